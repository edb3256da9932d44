"""What the tests of the experiments' command lines share."""

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from synthetic.arguments import dispatch


@pytest.fixture
def execute() -> Callable[..., dict]:
    """Run a sub-command of an experiment's `__main__` on one thread and return its summary."""

    def run(experiment: ModuleType, out: Path, *argv: str) -> dict:
        with pytest.raises(SystemExit) as done:
            dispatch(
                experiment.PROG,
                experiment.COMMANDS,
                [*argv, "--out", str(out), "--threads", "1"],
            )
        assert done.value.code == 0
        return json.loads((out / "summary.json").read_text())

    return run
