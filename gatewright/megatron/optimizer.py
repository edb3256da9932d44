"""Megatron's optimizer (sharded over data parallel) around AdamW, and its schedule.

Without Transformer Engine or Apex, Megatron falls back to torch's AdamW, whose per-parameter
step counters its distributed optimizer does not save and restore correctly.  `GroupStepAdamW`
counts steps per parameter group, as the GPU optimizers do, so the engine takes the same
code path here as on a cluster.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gatewright.megatron import cpu
from gatewright.megatron.build import fused, is_gate
from gatewright.megatron.config import ParallelConfig, TrainConfig


class GroupStepAdamW(torch.optim.Optimizer):
    """AdamW with one step counter per parameter group and torch's fused kernel.

    Takes the arguments of Apex's FusedAdam, which Megatron passes.  State per parameter:
    `exp_avg`, `exp_avg_sq` (Loshchilov & Hutter 2019, decoupled weight decay).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
    ) -> None:
        assert adam_w_mode
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self.gradient_divisor: float | None = None
        """What the next step divides gradients by: clipping without a pass of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            # Empty groups count too: all ranks must agree on the step when they save.
            group["step"] = group.get("step", 0) + 1
            updated = [p for p in group["params"] if p.grad is not None and p.numel()]
            if not updated:
                continue
            for p in updated:
                if not self.state[p]:
                    self.state[p]["exp_avg"] = torch.zeros_like(p)
                    self.state[p]["exp_avg_sq"] = torch.zeros_like(p)
            device = updated[0].device
            step = torch.tensor(float(group["step"]), device=device)
            divisor = self.gradient_divisor
            torch._fused_adamw_(
                updated,
                [p.grad for p in updated],
                [self.state[p]["exp_avg"] for p in updated],
                [self.state[p]["exp_avg_sq"] for p in updated],
                [],
                [step] * len(updated),
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=False,
                grad_scale=None if divisor is None else torch.tensor(divisor, device=device),
            )
        self.gradient_divisor = None


def clip_gradients(one: Any, max_norm: float, norm: float) -> None:
    """Scale the gradients of one of Megatron's optimizers down to a global norm of `max_norm`."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    if not isinstance(one.optimizer, GroupStepAdamW):
        clip_grad_by_total_norm_fp32(one.get_parameters(), max_norm, norm)
    elif norm > max_norm > 0:
        one.optimizer.gradient_divisor = (norm + 1e-6) / max_norm


def _use_our_adam() -> None:
    """Put GroupStepAdamW where Megatron looks for Apex's FusedAdam."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = GroupStepAdamW
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = GroupStepAdamW
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


def _groups(train: TrainConfig) -> dict[Any, Any]:
    """Return Megatron's overrides: which parameters have no weight decay, and the gates' group.

    The gates need a group of their own: in a bf16 model they are fp32, and the distributed
    optimizer can only save groups of one precision.  `is_decoupled_lr` tells the groups apart
    in a checkpoint; the learning rate is the same.
    """
    from megatron.core.optimizer.optimizer_config import ParamKey, ParamWithNamePredicate

    gates = ParamKey(with_name_predicate=ParamWithNamePredicate("gate", lambda p, n: is_gate(n)))
    vectors = ParamKey(
        with_name_predicate=ParamWithNamePredicate(
            "vector", lambda p, n: not is_gate(n) and (p.dim() == 1 or n.endswith(".bias"))
        )
    )
    return {
        gates: {
            "wd_mult": 0.0,
            "is_decoupled_lr": True,
            "max_lr": train.lr,
            "min_lr": train.min_lr,
        },
        vectors: {"wd_mult": 0.0},
    }


def wrap(model: nn.Module, parallel: ParallelConfig) -> nn.Module:
    """Wrap a model for data parallelism: contiguous fp32 gradient buffers, reduced once a step."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    with cpu.redirect():
        return DistributedDataParallel(
            config=model.config,
            ddp_config=DistributedDataParallelConfig(
                grad_reduce_in_fp32=True,
                use_distributed_optimizer=True,
                overlap_grad_reduce=parallel.overlap,
                overlap_param_gather=parallel.overlap,
            ),
            module=model,
        )


def build(wrapped: nn.Module, train: TrainConfig, parallel: ParallelConfig) -> tuple[Any, Any]:
    """Return Megatron's optimizer and learning rate schedule for a wrapped model."""
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer.optimizer_config import OptimizerConfig
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    if not fused():
        _use_our_adam()
    config = OptimizerConfig(
        optimizer="adam",
        lr=train.lr,
        min_lr=train.min_lr,
        weight_decay=train.weight_decay,
        adam_beta1=train.adam_beta1,
        adam_beta2=train.adam_beta2,
        adam_eps=train.adam_eps,
        clip_grad=train.clip_grad_norm,
        bf16=train.dtype == "bf16",
        params_dtype=torch.bfloat16 if train.dtype == "bf16" else torch.float32,
        use_distributed_optimizer=True,
        overlap_param_gather=parallel.overlap,
    )
    with cpu.redirect():
        optimizer = get_megatron_optimizer(config, [wrapped], config_overrides=_groups(train))
    for one in optimizer.chained_optimizers:
        if train.dtype == "fp32":  # main weights are views of the model's: nothing to copy back
            one._copy_main_params_to_model_params = lambda: None
    schedule = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=train.lr,
        min_lr=train.min_lr,
        lr_warmup_steps=train.lr_warmup_steps,
        lr_decay_steps=train.steps,
        lr_decay_style="cosine",
        start_wd=train.weight_decay,
        end_wd=train.weight_decay,
        wd_incr_steps=train.steps,
        wd_incr_style="constant",
    )
    return optimizer, schedule
