"""A Slurm that is a folder (fake_slurm.sh), for what a real one does too rarely to be tested."""

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest

from slurm import cancel, local, pipeline, spec, submission
from slurm.spec import Pipeline

SCRIPT = Path(__file__).parent / "fake_slurm.sh"


class FakeSlurm:
    """Slurm's commands on PATH, and a pipeline file, a site file and a run beside them."""

    def __init__(self, folder: Path, text: str) -> None:
        self.folder, self.run = folder / "slurm", folder / "run"
        self.file, self.site = folder / "p.toml", folder / "site.toml"
        (self.folder / "jobs").mkdir(parents=True)
        (self.folder / "bin").mkdir()
        for name in ("sbatch", "squeue", "scancel"):
            shutil.copy(SCRIPT, self.folder / "bin" / name)
        self.file.write_text(text)
        self.site.write_text('account = ""\npartition = ""\n')

    def submit(self, *settings: str, **more: Any) -> int:
        args = pipeline.Args(self.file, submit=True, site=self.site, run=self.run, set=settings)
        return pipeline.main(dataclasses.replace(args, **more))

    def cancel(self, **more: Any) -> None:
        cancel.main(cancel.Args(self.run, **more))

    def pipeline(self) -> Pipeline:
        return spec.load(self.file)

    def jobs(self) -> dict[str, str]:
        """Return job id -> state."""
        return {p.name: p.read_text().strip() for p in sorted((self.folder / "jobs").iterdir())}

    def becomes(self, job: str, state: str) -> None:
        (self.folder / "jobs" / job).write_text(state + "\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / name).write_text(text + "\n")

    def read(self, name: str) -> list[str]:
        return (self.folder / name).read_text().splitlines()

    def written(self) -> list[str]:
        """Return what lies in the run's folder of submissions."""
        folder = self.run / "pipeline" / "submissions"
        return sorted(p.name for p in folder.iterdir()) if folder.exists() else []

    def queued(self) -> list[str]:
        """Return the names of the tasks that each submission queued."""
        return [t.name for t in submission.submitted(self.run)]


def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> FakeSlurm:
    slurm = FakeSlurm(tmp_path, text)
    monkeypatch.setenv("PATH", f"{slurm.folder / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("FAKE_SLURM", str(slurm.folder))
    code = tmp_path / "code"
    code.mkdir()
    (code / "small.py").write_text("")
    monkeypatch.setattr(local, "CODE", code)  # what a submission freezes
    return slurm
