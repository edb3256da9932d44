"""How gates move during training: effective lengths and decay drift, per layer.

Definitions are `gatewright.gates`': tau from weights uses softplus(dt_bias), tau from data the
mean dt that the step's batch produced; drift is the change of alpha (from weights) since
initialisation.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from gatewright import gates
from gatewright.artifact import write_json
from gatewright.errors import UserError
from gatewright.megatron import distributed

INITIAL = "gates_at_start.json"


class GateTelemetry:
    """Measures the gates of a Mamba-2 model under training.

    Args:
        out: the run's folder; the gates at step 0 are kept there to measure drift from.
        fresh: the model has just been initialised.

    Raises:
        UserError: the file with the gates at step 0 is damaged.
    """

    def __init__(self, model: nn.Module, out: Path, *, fresh: bool) -> None:
        self._mixers = {layer.layer_number: layer.mixer for layer in model.decoder.layers}
        self._sums: dict[int, Tensor] = {}
        self._hooks: list[Any] = []
        path = Path(out) / INITIAL
        if fresh:
            now = self._gather({n: self._weights(m) for n, m in self._mixers.items()})
            if distributed.is_main():
                write_json(path, {n: [w.tolist() for w in ws] for n, ws in now.items()})
            dist.barrier()
        try:
            kept = json.loads(path.read_text()) if path.is_file() else {}
            self._start = {
                int(n): [torch.tensor(A_log), torch.tensor(dt_bias)]
                for n, (A_log, dt_bias) in kept.items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as e:
            raise UserError(
                f"{path}: is damaged ({e}); restore it, or remove it and do without alpha_drift"
            ) from e

    @staticmethod
    def _weights(mixer: nn.Module) -> list[Tensor]:
        return [mixer.A_log.detach().float().cpu(), mixer.dt_bias.detach().float().cpu()]

    def listen(self) -> None:
        """Start measuring dt in the forward passes that follow."""
        self._sums = {}
        for number, mixer in self._mixers.items():
            self._hooks.append(mixer.in_proj.register_forward_hook(self._listener(number, mixer)))

    def _listener(self, number: int, mixer: nn.Module) -> Any:
        def note(module: nn.Module, inputs: Any, output: Any) -> None:
            dt_raw = output[0][..., -mixer.nheads_local_tp :]  # zxBCdt: dt stands last
            dt_TH = F.softplus(dt_raw.detach().float() + mixer.dt_bias.detach().float())
            dt_TH = dt_TH.flatten(0, -2)
            total = torch.cat([dt_TH.sum(0), dt_TH.new_tensor([dt_TH.size(0)])]).cpu()
            self._sums[number] = self._sums.get(number, 0) + total

        return note

    def report(self) -> dict[str, float]:
        """Stop listening and return flat metrics, the same on every process.

        Per layer: quartiles over heads of tau from weights and from data (tokens), and the
        mean over heads of alpha's change since initialisation.
        """
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        mine = {}
        sums = self._summed_over_data_parallel()
        for number, mixer in self._mixers.items():
            total = sums[number]
            mine[number] = [*self._weights(mixer), total[:-1] / total[-1]]
        found = {}
        for number, (A_log, dt_bias, mean_dt) in sorted(self._gather(mine).items()):
            where = f"gates/layer{number - 1:02d}"
            taus = {
                "tau_weights": gates.tau_from_weights(A_log, dt_bias),
                "tau_data": gates.tau_from_dt(A_log, mean_dt),
            }
            for name, tau in taus.items():
                for part, q in (("q1", 0.25), ("median", 0.5), ("q3", 0.75)):
                    found[f"{where}/{name}_{part}"] = float(tau.quantile(q))
            if number in self._start:
                before = gates.alpha(*_alpha_arguments(*self._start[number]))
                after = gates.alpha(*_alpha_arguments(A_log, dt_bias))
                found[f"{where}/alpha_drift"] = float((after - before).mean())
        return found

    def _summed_over_data_parallel(self) -> dict[int, Tensor]:
        """Add up what the processes with other tokens of the same batch have measured."""
        from megatron.core import parallel_state

        numbers = sorted(self._sums)
        stacked = torch.stack([self._sums[n] for n in numbers]).to(distributed.device())
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        dist.all_reduce(stacked, group=group)
        return dict(zip(numbers, stacked.cpu(), strict=True))

    def _gather(self, mine: dict[int, list[Tensor]]) -> dict[int, list[Tensor]]:
        """Collect layers over pipeline and heads over tensor parallel processes."""
        from megatron.core import parallel_state

        heads: list[Any] = [None] * parallel_state.get_tensor_model_parallel_world_size()
        dist.all_gather_object(heads, mine, group=parallel_state.get_tensor_model_parallel_group())
        whole = {
            number: [torch.cat(parts) for parts in zip(*(h[number] for h in heads), strict=True)]
            for number in mine
        }
        stages: list[Any] = [None] * parallel_state.get_pipeline_model_parallel_world_size()
        dist.all_gather_object(
            stages, whole, group=parallel_state.get_pipeline_model_parallel_group()
        )
        return {number: values for stage in stages for number, values in stage.items()}


def _alpha_arguments(A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return A_log, gates.dt_from_weights(dt_bias)
