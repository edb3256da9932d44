"""Fine-tuning: `python -m sft.train RECIPE --model DIR --data DIR --out DIR`.

DeepSpeed ZeRO around a transformers model, on GPUs or on CPU; one process, or several under
`torchrun -m`.  Started again with the same flags after a crash, it goes on from the newest
checkpoint and ends in the same weights.  SIGTERM and SIGUSR1 (Slurm's time limit) make it save
and leave.

Exit codes: 0 finished; 2 bad input; 3 stopped at a loss or gradient that is not finite; 75 saved
and left early: start the same command again.
"""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gatewright import artifact, cli, launch, processor
from gatewright.config import split_recipe
from gatewright.errors import UserError
from sft import claims
from sft.inputs import Inputs, check
from sft.recipes import RECIPES, TrainConfig

if TYPE_CHECKING:
    from gatewright.megatron.signals import LeaveRequests
    from sft.pools import PoolBuilder

PROG = "python -m sft.train"
RUN = "run.json"
CHECKPOINTS = "checkpoints"
BEST = "best.safetensors"
"""Within the checkpoints: the weights of the lowest held-out loss, with `early_stop` only."""


@dataclass(frozen=True)
class Args:
    """Flags of `python -m sft.train RECIPE`."""

    model: Path
    """Hugging Face folder of a Mamba2 or Llama model, ours or another's."""
    data: Path
    """Folder made by sft.prepare."""
    out: Path
    """Folder to make: the fine-tuned model, its tokenizer and metrics."""
    train: TrainConfig
    """How to train; the recipe gives the defaults."""


def claim(args: Args, recipe: str, parents: dict[str, str]) -> None:
    """Make the output folder this run's, or find that it already is.

    Raises:
        UserError: it is finished, belongs to another run, or holds something else.
    """
    run = {"recipe": recipe, **parents, "train": dataclasses.asdict(args.train)}
    before = claims.held(args.out, RUN)
    if before is not None:
        if before != run:
            raise UserError(
                f"--out {args.out}: holds a run with other settings or inputs ({RUN}); "
                "repeat its flags to resume it, or choose another folder"
            )
        if aside(args.out).is_dir():  # it was killed before its manifest was written
            os.rename(aside(args.out), args.out / CHECKPOINTS)
        return
    claims.begin(args.out, RUN, run)
    shutil.rmtree(aside(args.out), ignore_errors=True)  # of a run whose folder was removed


def aside(out: Path) -> Path:
    """Return where a run's checkpoints wait, outside its folder, while that is being hashed."""
    return out.resolve().with_name(f".{out.resolve().name}.{CHECKPOINTS}")


class BadLoss(Exception):
    """A loss or gradient that is not finite: nothing of its step may be saved."""


class Run:
    """Everything a training run holds: model, data, engine, curriculum, log."""

    def __init__(self, args: Args, recipe: str, inputs: Inputs, device: Any) -> None:
        import torch.distributed as dist

        from sft import engine as deepspeed_engine
        from sft import parent
        from sft.curriculum import PoolCurriculum
        from sft.objective import PackedLoss
        from sft.packing import PackStream, plan

        self.args, self.config, self.device = args, args.train, device
        self.manifest, self.parent = inputs.manifest, inputs.parent
        self.samples, self.held_out = inputs.samples, inputs.held_out
        self.questions = inputs.questions
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        # Before anything is written: it may refuse.  transformers hands it out in eval mode.
        model = parent.load(self.parent).train()

        def claim_folder() -> None:
            hashes = {"model": artifact.content_hash(args.model)}
            claim(args, recipe, hashes | {"data": self.manifest["content_hash"]})

        deepspeed_engine.first_for_all(claim_folder)

        largest = int(self.samples.index["pool_size"].max())
        self.steps = self.config.steps
        if not self.steps:
            lengths = self.samples.index["length"].astype("int64")
            packs = len(plan(lengths, self.config.context_tokens, ("count",)))
            self.steps = math.ceil(self.config.epochs * packs / self.config.global_batch_packs)
        self.curriculum = PoolCurriculum(self.config, self.steps, largest)
        self.stream = PackStream(self.samples, self.config.context_tokens, self.config.seed)
        self.renderer = inputs.renderer
        pad = self.renderer.tokenizer.pad_token_id
        self.pad_id = self.renderer.stop_ids[-1] if pad is None else pad
        self._builder: PoolBuilder | None = None

        if self.config.gradient_checkpointing:
            model.gradient_checkpointing_enable()
        self.engine = deepspeed_engine.initialize(PackedLoss(model), self.config, self.world)
        self.step = 0
        self.best: dict[str, Any] = {}
        """The evaluation with the lowest held-out loss so far, and its step."""
        self.evaluations_since_best = 0
        self.left: str | None = None
        """What made `loop` save and leave before the end."""
        self._resume()

    def _resume(self) -> None:
        from sft import engine as deepspeed_engine

        folder = self.args.out / CHECKPOINTS
        found = deepspeed_engine.latest_checkpoint(folder, self.world)
        if found is None:
            return
        state = deepspeed_engine.load_checkpoint(self.engine, folder, found[0])
        self.step = state["step"]
        self.stream.restore(state["stream"])
        self.curriculum.level = state["level"]
        self.best = state["best"]
        self.evaluations_since_best = state["evaluations_since_best"]

    def checkpoint(self) -> None:
        """Write everything that the next step depends on."""
        from sft import engine as deepspeed_engine

        state = {
            "step": self.step,
            "stream": self.stream.state(),
            "level": self.curriculum.level,
            "best": self.best,
            "evaluations_since_best": self.evaluations_since_best,
        }
        folder = self.args.out / CHECKPOINTS
        keep = self.config.keep_checkpoints
        deepspeed_engine.save_checkpoint(self.engine, folder, self.step, state, keep)

    def train_step(self) -> dict[str, Any]:
        """Run one optimizer step; return its metrics (loss in nats per target token)."""
        from sft.engine import gradient_norm, learning_rate, set_learning_rate
        from sft.evaluate import all_sum
        from sft.packing import collate, targets

        began = time.perf_counter()
        config = self.config
        self._seed_dropout()
        pool_size = self.curriculum.at(self.step)
        self.stream.limit(pool_size)
        packs = self.stream.take(config.global_batch_packs)
        wanted = sum(targets(self.samples, pack) for pack in packs)
        lr = learning_rate(config, self.step, self.steps)
        set_learning_rate(self.engine, lr)
        mine = packs[self.rank :: self.world]
        passes = len(mine) // config.micro_batch_packs
        total = 0.0
        norm: float | None = None
        for i in range(passes):
            chosen = mine[i * config.micro_batch_packs : (i + 1) * config.micro_batch_packs]
            batch = collate(self.samples, chosen, self.pad_id).to(self.device)
            # DeepSpeed averages over passes and processes; the loss is a mean over targets.
            loss = self.engine(batch, passes * self.world / max(wanted, 1))
            self.engine.backward(loss)
            if i + 1 == passes:
                norm = gradient_norm(self.engine)
            self.engine.step()
            total += float(loss.detach())
        self.step += 1
        (total,) = all_sum([total / (passes * self.world)], self.device)
        if norm is None:
            norm = float(self.engine.get_global_grad_norm())
        if not (math.isfinite(total) and math.isfinite(norm)):
            raise BadLoss(f"step {self.step}: loss {total}, gradient norm {norm}")
        tokens = sum(int(self.samples.index[i]["length"]) for pack in packs for i in pack)
        seconds = time.perf_counter() - began
        return {
            "loss": total,
            "lr": lr,
            "grad_norm": norm,
            "pool_size": pool_size,
            "tokens": tokens,
            "targets": wanted,
            "tokens_per_second": round(tokens / seconds, 1),
        }

    def _seed_dropout(self) -> None:
        """Make a step's dropout its own, so that a resumed run drops what the whole one did."""
        import torch

        from gatewright.plackett_luce import generator

        random = generator("dropout", self.config.seed, self.step, self.rank)
        torch.manual_seed(int(random.integers(2**63)))

    def evaluate(self) -> dict[str, Any]:
        """Return held-out loss and, if asked for, call accuracy at the present pool size."""
        from sft import evaluate
        from sft.engine import gathered, save_weights
        from sft.held_out import pool_builder

        config = self.config
        share = (self.rank, self.world)
        improved = False
        out: dict[str, Any] = {}
        loss = evaluate.held_out_loss(
            self.engine,
            self.held_out,
            config.context_tokens,
            config.eval_packs,
            self.pad_id,
            share,
            self.device,
        )
        if loss is not None:
            out["held_out_loss"] = loss
            improved = loss < self.best.get("held_out_loss", math.inf)
            self.evaluations_since_best = 0 if improved else self.evaluations_since_best + 1
        if self.questions:
            if self._builder is None:
                self._builder = pool_builder(self.args.data, self.manifest)
            pool_size = self.curriculum.at(max(self.step - 1, 0))
            with gathered(self.engine) as module:
                found = evaluate.call_accuracy(
                    module.model,  # type: ignore[arg-type]
                    self.renderer,
                    self._builder,
                    self.questions,
                    pool_size,
                    config.eval_new_tokens,
                    share,
                    self.device,
                )
            out |= {f"call_{name}": value for name, value in found.items()}
            out["call_pool_size"] = pool_size
            self.curriculum.report(found["right_tool"])
        if improved:
            self.best = {"step": self.step, **out}
            if config.early_stop:
                save_weights(self.engine, self.args.out / CHECKPOINTS / BEST)
        return out

    @property
    def stopped_early(self) -> bool:
        return bool(self.config.early_stop) and (
            self.evaluations_since_best >= self.config.early_stop
        )

    def loop(self, requests: LeaveRequests | None = None) -> dict[str, Any]:
        """Train to the end, or until asked to leave; return the last evaluation."""
        from gatewright.runlog import RunLog, progress

        first = self.rank == 0
        log = None
        if first:
            log = RunLog(self.args.out, resume_step=self.step if self.step else None)
        last: dict[str, Any] = {}
        bar = progress(
            total=self.steps, initial=self.step, desc="fine-tuning", unit="step", disable=not first
        )
        while self.step < self.steps and not self.stopped_early:
            metrics = self.train_step()
            evaluates = self.config.eval_every
            due = self.step == self.steps or bool(evaluates and self.step % evaluates == 0)
            if due:
                last = self.evaluate()
                metrics |= last
            if log is not None and (due or self.step % self.config.log_every == 0):
                log.log(self.step, **metrics)
            bar.set_postfix(loss=f"{metrics['loss']:.3f}", k=metrics["pool_size"])
            bar.update()
            if requests is not None:
                self.left = requests.reason()
            every = self.config.checkpoint_every
            if self.step < self.steps and (self.left or (every and self.step % every == 0)):
                self.checkpoint()
                if self.left:
                    break
            self.left = None  # at the end there is nothing left to leave
        if self.left is None and not last:  # resumed between an early stop and its end
            last = self.evaluate()
        bar.close()
        if log is not None:
            log.close()
        return last

    def finish(self, last: dict[str, Any]) -> None:
        """Write the model and the manifest; checkpoints for resuming go."""
        import torch.distributed as dist

        from sft import parent
        from sft.engine import gathered, load_weights

        kept = {"step": self.step, **last}
        if self.config.early_stop and self.best:
            kept = self.best
        if kept["step"] != self.step:
            load_weights(self.engine, self.args.out / CHECKPOINTS / BEST)
        with gathered(self.engine) as module:
            if self.rank == 0:
                parent.save(
                    module.model,  # type: ignore[arg-type]
                    self.args.out,
                    self.args.data / "tokenizer",
                    self.renderer.stop_ids,
                )
        dist.barrier()
        if self.rank == 0:
            waiting = aside(self.args.out)
            shutil.rmtree(waiting, ignore_errors=True)
            if (self.args.out / CHECKPOINTS).is_dir():
                os.rename(self.args.out / CHECKPOINTS, waiting)
            artifact.finish(
                self.args.out,
                kind="hf-model",
                config=self.args,
                parents={"model": self.args.model, "data": self.args.data},
                seed=self.config.seed,
                extra={
                    "family": self.parent.family,
                    "gate_scale": self.parent.gate_scale,
                    "steps": self.step,
                    "stopped_early": self.stopped_early,
                    "kept_step": kept.pop("step"),
                    **kept,
                },
            )
            shutil.rmtree(waiting, ignore_errors=True)


def main(recipe: str, args: Args) -> int:
    """Fine-tune a model on prepared chats."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    inputs = check(recipe, args)
    if os.path.isfile(args.out / artifact.MANIFEST):
        shutil.rmtree(aside(args.out), ignore_errors=True)
    claims.require_unfinished(args.out)
    from gatewright.megatron.signals import EXIT_BAD_LOSS, EXIT_RUN_AGAIN, LeaveRequests
    from sft.engine import process_group, use_device

    device = use_device()
    with process_group(device), LeaveRequests() as requests:
        run = Run(args, recipe, inputs, device)
        if run.rank == 0 and args.train.precision == "bf16":
            processor.warn_of_slow_bf16("--train.precision fp32", device.type)
        try:
            last = run.loop(requests)
        except BadLoss as e:
            if run.rank == 0:
                print(
                    f"error: {e}; nothing of it was saved: give a lower --train.lr, or look for "
                    f"weights that are not finite in --model {args.model}",
                    file=sys.stderr,
                )
            return EXIT_BAD_LOSS
        if run.left is None:
            run.finish(last)
            return 0
        if run.rank == 0:
            print(
                f"left at step {run.step} of {run.steps} ({run.left}), saved in {args.out}: run "
                "the same command again to go on"
            )
        return EXIT_RUN_AGAIN


def entry() -> None:
    """Read the recipe's name, then the flags over the recipe's values."""
    import tyro

    try:
        recipe, argv = split_recipe(sys.argv[1:], RECIPES, PROG)
        config = RECIPES.get(recipe)
    except UserError as e:
        cli.fail(e)
    missing: Any = tyro.MISSING
    default = Args(model=missing, data=missing, out=missing, train=config)
    cli.run(
        lambda args: main(recipe, args),
        Args,
        prog=f"{PROG} {recipe}",
        description=main.__doc__,
        default=default,
        argv=argv,
    )


if __name__ == "__main__":
    launch.retune()
    entry()
