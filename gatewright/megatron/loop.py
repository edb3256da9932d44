"""The pretraining loop: the same on one CPU process and on a cluster."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from gatewright import runlog
from gatewright.megatron import (
    build,
    checkpoints,
    cpu,
    data,
    distributed,
    health,
    initial,
    optimizer,
    signals,
    telemetry,
)
from gatewright.megatron.config import PretrainConfig

BAD_LOSS = "a loss or gradient is not finite"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a call of `train` ended."""

    step: int
    """Optimizer steps done so far, earlier starts included."""
    finished: bool
    """False when a signal or the time limit ended the run early."""
    reason: str | None = None
    """What ended it early."""


def train(
    config: PretrainConfig, corpus: data.Corpus, out: Path, init_from: Path | None = None
) -> Outcome:
    """Train to the end of the run, from its latest checkpoint if `out` holds one.

    Args:
        init_from: a checkpoint whose weights a run without one of its own starts from.

    Raises:
        UserError: a layout that cannot hold the model, a corpus that is too short, a
            checkpoint of another model, or a full disk.
    """
    with (
        signals.LeaveRequests(config.exit_duration_minutes) as requests,
        distributed.processes(config.parallel, seed=config.train.seed) as data_parallel,
    ):
        run = Run(config, corpus, out, data_parallel, init_from)
        with run:
            while run.step < config.train.steps:
                found = run.forward_backward()
                found, trouble = run.examine(found)
                if trouble == "not_finite" and config.train.on_bad_loss == "stop":
                    return Outcome(run.step, finished=False, reason=BAD_LOSS)
                lr = run.update_weights(found, skip=trouble == "not_finite")
                run.write_down(found, lr)
                run.publish()
                reason = requests.reason()
                last = run.step == config.train.steps
                if reason or last or run.step % config.checkpoint.every_steps == 0:
                    run.save()
                if reason and not last:
                    return Outcome(run.step, finished=False, reason=reason)
        return Outcome(run.step, finished=True)


@dataclasses.dataclass(frozen=True)
class Found:
    """What one step's forward and backward passes gave, the same on every process."""

    loss: float
    """Mean cross-entropy per token over the global batch, in nats."""
    grad_norm: float
    """Global gradient norm before clipping."""


class Run:
    """A model, its optimizer, its data and its checkpoints, at some step of a run."""

    def __init__(
        self,
        config: PretrainConfig,
        corpus: data.Corpus,
        out: Path,
        data_parallel: int,
        init_from: Path | None = None,
    ) -> None:
        train, parallel = config.train, config.parallel
        self.config = config
        self.out = Path(out)
        self.init_from = init_from
        self.corpus = corpus
        self.dtype = torch.bfloat16 if train.dtype == "bf16" else torch.float32
        self.microbatches = train.microbatches(data_parallel)
        self.data_parallel = data_parallel
        self.step = 0
        self.consumed_samples = 0
        parallel.check(config.model, train.seq_len_tokens)
        self.model = build.build_model(
            config.model,
            dtype=self.dtype,
            parallel=parallel,
            fp32_gates=train.fp32_gates,
            init_std=train.init_std,
            init_gate_offset=config.init_gate_offset,
            recompute=train.recompute,
        )
        self.wrapped = optimizer.wrap(self.model, parallel)
        self.optimizer, self.schedule = optimizer.build(self.wrapped, train, parallel)
        _connect(self.model, self.wrapped, self.optimizer)
        self.dataset = data.build_dataset(corpus, train, self.out / "data-index")

    def __enter__(self) -> Run:
        found = checkpoints.latest(self.out)
        if distributed.is_main():
            checkpoints.remove_partial(self.out)
        if found is not None:
            self.step, self.consumed_samples = checkpoints.load(
                found, self.model, self.optimizer, self.schedule
            )
        elif self.init_from is not None:
            initial.load_weights(self.init_from, self.out, self.model, self.optimizer)
        checkpoints.require_space(self.out, self.model)
        self._saver = checkpoints.Saver(self.out, self.config.checkpoint, self.config)
        self._batches = data.Batches(
            self.dataset,
            self.config.train,
            data_parallel=self.data_parallel,
            consumed_samples=self.consumed_samples,
            eod_id=self.corpus.eod_id,
        )
        self._health = health.LossHealth(self.config.train.spike_factor)
        if found is not None and self.config.train.spike_factor:
            self._recall_losses()
        self._gates: telemetry.GateTelemetry | None = None
        self.gate_metrics: dict[str, float] = {}
        if self.config.model.family == "mamba2" and self.config.log.gates_every_steps:
            self._gates = telemetry.GateTelemetry(self.model, self.out, fresh=found is None)
        self._log = None
        if distributed.is_main():
            self._log = runlog.RunLog(
                self.out,
                resume_step=self.step if found is not None else None,
                tensorboard=self.config.log.tensorboard,
            )
        self._bar = runlog.progress(
            total=self.config.train.steps * self.config.train.tokens_per_step,
            initial=self.step * self.config.train.tokens_per_step,
            desc=f"pretrain {self.config.model.family}",
            unit="tok",
            scale=True,
            disable=not distributed.is_main(),
        )
        self.model.train()
        self._clock = time.perf_counter()
        self._clock_step = self.step
        return self

    def __exit__(self, *exc: object) -> None:
        if exc[0] is None:
            if not self._saver.finish(block=True):
                self.save(at_once=True)
            self._saver.close()
        elif dist.get_world_size() == 1:  # other processes may not be here to agree
            self._saver.finish(block=False)
        _disconnect(self.model)
        self._bar.close()
        if self._log is not None:
            self._log.close()

    def _recall_losses(self) -> None:
        """Go on judging losses by those that the run wrote down before it was cut short."""
        state = [self._health]
        path = self.out / "metrics.jsonl"
        if distributed.is_main() and path.is_file():
            self._health.replay(runlog.read_metrics(path), self.step)
        dist.broadcast_object_list(state, src=0)  # processes must judge alike
        self._health = state[0]

    def forward_backward(self) -> Found:
        """Accumulate the gradients of the step's microbatches over all processes."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        train = self.config.train
        rows, length = train.micro_batch_sequences, train.seq_len_tokens
        if train.reset_at_documents:
            rows, length = 1, rows * length  # documents lie end to end in one row
        gates = self._gates if self._gates_due(self.step + 1) else None
        if gates is not None:
            gates.listen()
        with cpu.redirect():
            self.wrapped.zero_grad_buffer()
            self.optimizer.zero_grad()
            losses = get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=self._batches,
                model=[self.wrapped],
                num_microbatches=self.microbatches,
                seq_length=length,
                micro_batch_size=rows,
                forward_only=False,
            )
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
        self.gate_metrics = {} if gates is None else gates.report()
        return Found(mean_loss(losses), norm)

    def examine(self, found: Found) -> tuple[Found, str | None]:
        """Return what a step found and what is wrong with it, its documents written down.

        A suspicious step is run once more on the same batch, as Megatron's rerun machine
        does: what repeats is the data's or the model's doing, what does not is the hardware's.
        The gradients are then those of the second pass, so what it found counts.
        """
        kind = self._health.judge(found.loss, found.grad_norm)
        if kind is None:
            return found, None
        self._batches.seek(self.consumed_samples)
        again = self.forward_backward()
        same = repr((again.loss, again.grad_norm)) == repr((found.loss, found.grad_norm))
        if distributed.is_main():
            end = self.consumed_samples + self.config.train.global_batch_sequences
            health.record(
                self.out,
                step=self.step + 1,
                loss=found.loss,
                grad_norm=found.grad_norm,
                trouble=health.Trouble(kind, reproduced=same),
                documents=data.documents_of(self.dataset, range(self.consumed_samples, end)),
            )
        if not same:
            finite = math.isfinite(again.loss) and math.isfinite(again.grad_norm)
            kind = None if finite else "not_finite"
        return again, kind

    def update_weights(self, found: Found, *, skip: bool = False) -> float:
        """Clip and take an optimizer step; `skip` passes the batch by.  Returns the rate."""
        self.schedule.step(increment=1)  # the first step already has a warm-up rate above zero
        if not skip:
            with cpu.redirect():
                for one in self.optimizer.chained_optimizers:
                    optimizer.clip_gradients(one, self.config.train.clip_grad_norm, found.grad_norm)
                self.optimizer.step_with_ready_grads()
        self.step += 1
        self.consumed_samples += self.config.train.global_batch_sequences
        return float(self.optimizer.param_groups[0]["lr"])

    def _gates_due(self, step: int) -> bool:
        every = self.config.log.gates_every_steps
        return bool(every) and (step % every == 0 or step in (1, self.config.train.steps))

    def write_down(self, found: Found, lr: float) -> None:
        """Move the progress bar and write metrics when they are due."""
        train, log = self.config.train, self.config.log
        self._bar.update(train.tokens_per_step)
        if self._log is None:
            return
        if self.step % log.every_steps == 0 or self.step in (1, train.steps) or self.gate_metrics:
            now = time.perf_counter()
            done = (self.step - self._clock_step) * train.tokens_per_step
            self._bar.set_postfix(loss=f"{found.loss:.3f}", refresh=False)
            self._log.log(
                self.step,
                loss=found.loss,
                grad_norm=found.grad_norm,
                lr=lr,
                tokens=self.step * train.tokens_per_step,
                tokens_per_second=round(done / (now - self._clock), 1),
                **self.gate_metrics,
            )
            self._clock, self._clock_step = now, self.step

    def publish(self) -> None:
        """Publish an asynchronous save once it is written, or make up for one that failed."""
        if not self._saver.finish(block=False):
            self.save(at_once=True)

    def save(self, *, at_once: bool = False) -> None:
        """Write a checkpoint of this step; `at_once` in this process, whatever the flags say."""
        gathers_late = self.config.parallel.overlap
        if gathers_late:  # parameters arrive with the next forward pass; fetch them now
            self.wrapped.disable_forward_pre_hook(param_sync=True)
        self._saver.save(
            self.model,
            self.optimizer,
            self.schedule,
            self.step,
            self.consumed_samples,
            at_once=at_once,
        )
        if gathers_late:
            self.wrapped.enable_forward_pre_hook()


def _connect(model: nn.Module, wrapped: nn.Module, optim: Any) -> None:
    """Tell Megatron's schedules how to scale, hold back and finish gradients."""
    from megatron.core.distributed import finalize_model_grads

    model.config.grad_scale_func = optim.scale_loss
    model.config.no_sync_func = wrapped.no_sync
    model.config.finalize_model_grads_func = finalize_model_grads


def _disconnect(model: nn.Module) -> None:
    """Undo `_connect`, so that a run ends with its last user.

    The optimizer's slices of weights hold autograd nodes, whose hooks hold the model.  Were the
    optimizer reachable from it, that would be a cycle through C++, which Python's collector does
    not see: the model would stay for the life of the process, and its gloo threads with it.
    """
    config = model.config
    config.grad_scale_func = config.no_sync_func = config.finalize_model_grads_func = None


def forward_step(batches: Iterator[data.Batch], model: nn.Module) -> tuple[Tensor, Any]:
    """Run one microbatch forward; returns the output and the function that makes it a loss.

    The model answers with each token's loss, or with their sum; every token of a batch counts.
    """
    batch = next(batches)
    output = model(
        batch.tokens_BS,
        batch.position_ids_BS,
        None,
        labels=batch.labels_BS,
        packed_seq_params=batch.packed,
    )

    def loss_of(losses: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        total = losses.float().sum()
        count = batch.labels_BS.numel()
        tokens = torch.tensor(count, dtype=torch.int, device=losses.device)
        return total, tokens, {"loss": total.detach(), "tokens": tokens.clone()}

    return output, loss_of


def mean_loss(losses: list[dict[str, Tensor]]) -> float:
    """Return the mean loss per token over the global batch, the same on every process."""
    from megatron.core import parallel_state

    sums = torch.zeros(2, dtype=torch.float64, device=distributed.device())
    for one in losses:
        sums += torch.stack([one["loss"].double(), one["tokens"].double()])
    dist.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    dist.broadcast(
        sums,
        src=parallel_state.get_pipeline_model_parallel_last_rank(),
        group=parallel_state.get_pipeline_model_parallel_group(),
    )
    return float(sums[0] / sums[1])
