"""The gradient of a training step equals that of the algorithm's published formula, computed in float64."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch

from astuner.algorithms.registry import resolve
from astuner.backbone.local.policy import Optimizer, Policy
from astuner.backbone.local.update import PolicyUpdate
from astuner.config.model import ModelConfig
from astuner.config.trainer import PackMode
from tests.backbone.published_steps import STEPS, assert_gradient, published_step


class KeepsGradient(Optimizer):
    """Keeps the gradient instead of making a step."""

    def step(self, step: int) -> float:
        self.gradient = torch.cat([parameter.grad.flatten() for parameter in self._parameters])
        return 1.0


# Packing is independent of the formula; test_update_modes.py compares both ways for each algorithm.
@pytest.mark.parametrize(("name", "pack"), list(zip(STEPS, cycle(["tree", "none"]), strict=False)))
def test_gradient_of_a_step_is_that_of_the_published_formula(model_folder: Path, name: str, pack: PackMode) -> None:
    step = published_step(name, model_folder)
    config = step.config(update={"pack": pack})
    policy = Policy(ModelConfig(), str(model_folder), torch.device("cpu"), pack)
    optimizer = KeepsGradient(policy.trainable(), config.trainer_common.optim, 1)
    update = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer, distiller=step.distiller)
    # The logprobs of the answers are not those of the policy, on purpose.
    update._check_logprob_gap = lambda *_: None  # type: ignore[method-assign]
    update.step(step.episodes, 1)
    assert_gradient(optimizer.gradient, step, model_folder)
