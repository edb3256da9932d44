"""`python -m tools.plan` prints the plan of a recipe and refuses what cannot work."""

from __future__ import annotations

import json

import pytest

from tools import plan


def run(arguments: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> str:
    with pytest.raises(SystemExit) as caught:
        plan.run(arguments)
    assert caught.value.code == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def test_the_paper_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """300B tokens on 128 H100 in "less than two days" (the paper's appendix) at MFU 25%."""
    for recipe, billions in (("mamba2_1p5b_128xh100", 1.482), ("llama_2b_128xh100", 1.976)):
        found = json.loads(run([recipe, "--mfu", "0.25", "--json"], capsys))
        assert round(found["parameters"] / 1e9, 3) == billions
        assert 300e9 <= found["tokens"] < 300.01e9
        assert 10 < found["hours"] < 48
        # Hours, MFU and FLOPs must say the same thing.
        rate = found["tokens"] * found["training_flops_per_token"] / (found["hours"] * 3600)
        assert rate / (128 * 989.4e12) == pytest.approx(0.25)
        memory = found["memory_bytes_per_gpu"]
        assert memory["full"]["total"] < memory["none"]["total"] < 80e9
        assert memory["none"]["weights"] == 2 * found["parameters"]
        assert memory["none"]["optimizer"] == 12 * found["parameters"] / 128
        assert found["checkpoint_bytes"] == 14 * found["parameters"]


def test_the_table_names_every_part(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(["mamba2_1p5b_128xh100"], capsys)
    for word in ("1.482 B", "286,103", "optimizer", "recomputed", "128 GPUs", "20.7 GB"):
        assert word in printed


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ("mamba2_1p5b_128xh100 --parallel.tensor 16", "model.ngroups 8 is not a multiple"),
        ("llama_2b_128xh100 --model.vocab-size 50257 --parallel.tensor 2", "the next that is"),
        ("llama_2b_128xh100 --gpus 12 --parallel.tensor 8", "12 processes cannot hold"),
        ("llama_2b_128xh100 --gpus 96", "is not a multiple of micro batch"),
        ("llama_2b_128xh100 --mfu 40", "--mfu 40.0"),
        ("llama_2b_128xh100 --mfu nan", "--mfu nan"),
        ("llama_2b_128xh100 --gpus 0", "--gpus 0: must be at least 1"),
        ("llama_2b_128xh100 --gpus -8", "--gpus -8: must be at least 1"),
        ("llama_2b_128xh100 --peak-tflops 0", "--peak-tflops 0.0: must be finite and above 0"),
        ("llama_2b_128xh100 --peak-tflops -1", "--peak-tflops -1.0: must be finite and above 0"),
        ("llama_2b_128xh100 --peak-tflops nan", "--peak-tflops nan: must be finite and above 0"),
        ("mamba2_1p5b_128xh100 --model.d-state 0", "model.d_state is 0"),
        ("mamba2_1p5b_128xh100 --model.chunk-size 0", "model.chunk_size is 0"),
        ("mamba2_1p5b_128xh100 --model.d-conv 0", "model.d_conv is 0"),
        ("mamba2_1p5b_128xh100 --model.expand 0", "model.expand is 0"),
        ("llama_2b_128xh100 --model.head-dim 127", "give an even number"),
        ("llama_2b_128xh100 --model.rope-theta -1", "model.rope_theta is -1.0"),
        (
            "llama_2b_128xh100 --train.seq-len-tokens 1000000",
            "is above --model.max-seq-len-tokens 4096; raise that",
        ),
        ("llama_2b_128xh10", "did you mean 'llama_2b_128xh100'"),
    ],
)
def test_what_cannot_work_is_refused(
    flags: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    printed = run(flags.split(), capsys, code=2)
    assert reason in printed
    assert printed.count("\n") == 1
