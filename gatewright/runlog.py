"""What a long run tells people: progress bars, metrics.jsonl and TensorBoard events."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any, TypeVar

from tqdm import tqdm

T = TypeVar("T")


def progress(
    items: Iterable[T] | None = None,
    *,
    total: float | None = None,
    desc: str,
    unit: str = "it",
    initial: float = 0,
    scale: bool = False,
    disable: bool = False,
) -> Any:
    """Return a progress bar with rate and time left (a tqdm object).

    On a terminal it redraws; in a log file it writes a line every 10 seconds instead.
    `GATEWRIGHT_QUIET=1` silences it.
    """
    tty = sys.stderr.isatty()
    return tqdm(
        items,
        total=total,
        desc=desc,
        unit=unit,
        initial=initial,
        unit_scale=scale,
        dynamic_ncols=tty,
        mininterval=0.2 if tty else 10,
        maxinterval=1 if tty else 30,
        disable=disable or os.environ.get("GATEWRIGHT_QUIET") == "1",
        file=sys.stderr,
    )


class RunLog:
    """Append-only metrics of one run: `metrics.jsonl` and, on request, TensorBoard events.

    Each line is a JSON object with `step`, `time` (seconds since the epoch) and the metrics.
    After a resume, lines of steps that will be run again are dropped first, so that the file
    holds each step once.

    Args:
        folder: where `metrics.jsonl` and `tensorboard/` go; made if missing.
        resume_step: the last finished step of a resumed run; None starts the file anew.
        tensorboard: also write TensorBoard events.
    """

    def __init__(
        self, folder: Path, *, resume_step: int | None = None, tensorboard: bool = True
    ) -> None:
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / "metrics.jsonl"
        if resume_step is None:
            self.path.unlink(missing_ok=True)
        elif self.path.exists():
            kept = [row for row in read_metrics(self.path) if row["step"] <= resume_step]
            tmp = self.path.with_suffix(".jsonl.tmp")
            tmp.write_text("".join(json.dumps(row) + "\n" for row in kept))
            os.replace(tmp, self.path)
        self._file: IO[str] = open(self.path, "a", encoding="utf-8")  # noqa: SIM115
        self._writer: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resume_step is None else resume_step + 1
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=purge)

    def log(self, step: int, **metrics: Any) -> None:
        """Write one line; numbers also go to TensorBoard."""
        row = {"step": step, "time": round(time.time(), 3), **metrics}
        self._file.write(json.dumps(row) + "\n")
        self._file.flush()
        if self._writer is not None:
            for name, value in metrics.items():
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._file.close()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a metrics.jsonl, leaving out a last line cut short by a crash."""
    with open(path, encoding="utf-8") as f:
        for line in f:
            if not line.endswith("\n"):
                return
            yield json.loads(line)
