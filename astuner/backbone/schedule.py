"""The learning rate, a function of the step alone, so that a resumed run needs no scheduler state."""

from __future__ import annotations

import math

from astuner.config.trainer import OptimConfig


def learning_rate(config: OptimConfig, total_steps: int, step: int) -> float:
    """Return the learning rate of training step `step` (1-based): linear warm-up, then the schedule."""
    if step <= config.lr_warmup_steps:
        return config.lr * step / (config.lr_warmup_steps + 1)
    span = max(total_steps - config.lr_warmup_steps, 1)
    done = min((step - 1 - config.lr_warmup_steps) / span, 1.0)
    shape = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[config.lr_scheduler]
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * shape)
