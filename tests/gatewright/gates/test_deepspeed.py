"""A universal checkpoint that DeepSpeed itself wrote: edited, then resumed by DeepSpeed."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gatewright.errors import UserError
from gatewright.gates import edits, find, rewrite
from gatewright.gates.edits import Edit

ROOT = Path(__file__).resolve().parents[3]

TRAIN = """
import json, sys
import torch, deepspeed
from tests.gatewright.gates import families

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would compile for a minute
folder, stage, load = sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3
config = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-6, "torch_adam": True}},
    "checkpoint": {"load_universal": load},
}
model = families.build("mamba2").train()
engine, *_ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), config=config
)
if load:
    engine.load_checkpoint(folder, tag="universal")
tokens = torch.arange(20)[None]
engine.backward(engine(input_ids=tokens, labels=tokens).loss)
engine.step()
if load:
    found = {n: p for n, p in engine.module.named_parameters() if "A_log" in n}
    with deepspeed.zero.GatheredParameters(list(found.values())):
        gates = {n: p.tolist() for n, p in found.items()}
    if engine.global_rank == 0:
        print("GATES" + json.dumps(gates))
else:
    engine.save_checkpoint(folder, tag="sharded")
"""


def run(*command: str | Path) -> str:
    done = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=900,
        env={
            **os.environ,
            **{"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_resumes_from_the_edited_gates(stage: int, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(TRAIN)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch += [str(script)]
    folder = tmp_path / "run"
    run(*launch, folder, str(stage))
    with pytest.raises(UserError, match="make it universal"):
        find.find_gates(folder / "sharded")
    run(
        *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
        *("--input_folder", folder / "sharded", "--output_folder", folder / "universal"),
        *("--num_extract_workers", "1", "--num_merge_workers", "1", "--inject_missing_state"),
    )
    gates = find.find_gates(folder / "universal")
    assert len(gates.gates) == 3
    assert gates.warnings == ()
    masters = [g.A_log if stage == 3 else g.masters[0] for g in gates.gates]
    assert [m.dtype for m in masters] == ["F32"] * 3
    before = [gates.checkpoint.read_float(m) for m in masters]
    plan = edits.resolve(Edit("scale", 0.25), gates, {})
    edited = tmp_path / "edited"
    edited.mkdir()
    rewrite.write_edits(gates, [plan], edited / "universal", dts={})
    for name in ("latest", "latest_universal"):
        (edited / name).write_text("universal")
    printed = run(*launch, edited, str(stage), "load")
    after = json.loads(printed.partition("GATES")[2].splitlines()[0])
    for gate, old in zip(gates.gates, before, strict=True):
        new = np.array(after[gate.A_log.name])
        np.testing.assert_allclose(new, old + math.log(0.25), atol=0.02)
