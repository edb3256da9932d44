"""Fixtures of the fine-tuning tests, each made once a session."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sft.material import build_model, build_tokenizer, chat_rows, write_jsonl


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from gatewright.chat import TEMPLATE

    return build_tokenizer(tmp_path_factory.mktemp("tok") / "tokenizer", TEMPLATE)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {f: build_model(folder / f, f, tokenizer=tokenizer) for f in ("mamba2", "llama")}


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path) -> Path:
    from sft import prepare

    folder = tmp_path_factory.mktemp("data")
    rows = write_jsonl(folder / "rows.jsonl", chat_rows(60))
    prepare.main(
        prepare.Args(
            input=(rows,),
            tokenizer=tokenizer,
            out=folder / "data",
            max_pool_size=4,
            context_tokens=512,
            held_out=0.2,
        )
    )
    return folder / "data"


@pytest.fixture(scope="module")
def group() -> Iterator[None]:
    """DeepSpeed's process group of one, for runs inside this process."""
    from sft.engine import process_group, use_device

    with process_group(use_device()):
        yield
