"""AdamW with a learning rate that depends on the step only, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from astuner.backbone.training.schedule import learning_rate
from astuner.config.optimizer import OptimConfig
from astuner.errors import BackboneError

_VALUES_PER_PARAMETER = 256


class GradientNotFinite(BackboneError):
    """The gradient of a mini-batch is not finite.

    Attributes:
        norm: its norm.
    """

    def __init__(self, step: int, norm: float) -> None:
        super().__init__(
            f"step {step}: the gradient's norm is {norm}; lower trainer_common.optim.lr, or set model.dtype: float32"
        )
        self.norm = norm


class Optimizer:
    """AdamW, gradient clipping, and the schedule of `trainer_common.optim`.

    Attributes:
        total_steps: number of training steps of the run, on which the schedule depends.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], config: OptimConfig, total_steps: int) -> None:
        self._parameters = list(parameters)
        self._config = config
        self.total_steps = total_steps
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of training step `step` (1-based)."""
        return learning_rate(self._config, self.total_steps, step)

    def step(self, step: int) -> float:
        """Apply the accumulated gradient and clear it; return its norm before clipping.

        Raises:
            GradientNotFinite: the gradient is not finite; the weights are unchanged.
        """
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        if not math.isfinite(norm):
            self._adamw.zero_grad(set_to_none=True)
            raise GradientNotFinite(step, norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr(step)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def sampled_weights(self) -> torch.Tensor:
        """Return a copy of some hundred values per parameter, as one vector, to see whether weights changed."""
        values = [parameter.detach().flatten() for parameter in self._parameters]
        return torch.cat([value[:: max(1, len(value) // _VALUES_PER_PARAMETER)].float() for value in values])

    def state(self) -> dict[str, Any]:
        """Return the state of AdamW, for `load`."""
        return self._adamw.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self._adamw.load_state_dict(state)
