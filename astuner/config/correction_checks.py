"""Checks of `trainer_common.correction`."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.config.algorithms import ALGORITHMS
from astuner.config.corrections import CORRECTIONS
from astuner.config.keys import parts
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig


def correction_problems(run: AstunerConfig) -> Iterator[Problem]:
    """Yield the contradictions between the keys of `trainer_common.correction` and between them and other keys."""
    correction, section = run.trainer_common.correction, "astuner.trainer_common.correction"
    mode = "none" if correction.mode == "auto" else correction.mode
    spec, algorithm = CORRECTIONS[mode], ALGORITHMS[run.trainer_common.algorithm.adv_estimator]
    has_ratio = algorithm.reinforcement is not None and algorithm.reinforcement.loss.has_ratio
    if spec.weights and has_ratio and correction.old_logprobs == "sampler":
        yield _problem(
            f"{section}.old_logprobs is sampler, so the ratio of the loss is to the sampler, and {section}.mode {mode} "
            "would correct for the sampler again; remove old_logprobs, or write mode: none, geo_rs or k3_rs",
            f"{section}.old_logprobs",
            f"{section}.mode",
        )
    several = run.backbone == "trinity" and run.trainer_common.mini_batch_num > 1
    if several and correction.old_logprobs == "trainer":
        yield _problem(
            f"{section}.old_logprobs is trainer, and with trainer_common.mini_batch_num "
            f"{run.trainer_common.mini_batch_num}, trinity updates the weights before it computes the logprobs of the "
            "later mini-batches; remove old_logprobs, write mini_batch_num: 1, or use --backbone=verl",
            f"{section}.old_logprobs",
            "astuner.trainer_common.mini_batch_num",
        )
    elif several and spec.weights and has_ratio:
        yield _problem(
            f"{section}.mode {mode} needs the trainer's logprobs before the update, and with trainer_common."
            f"mini_batch_num {run.trainer_common.mini_batch_num}, trinity updates the weights before it computes those "
            "of the later mini-batches; write mode: none, geo_rs or k3_rs, write mini_batch_num: 1, or use "
            "--backbone=verl",
            f"{section}.mode",
            "astuner.trainer_common.mini_batch_num",
        )
    if correction.mode == "auto":
        return
    has_lower_bound = {"weight": spec.masks, "rejection": spec.rejects == "geometric"}
    for name, (low, high) in {"weight": correction.weight_range, "rejection": correction.rejection_range}.items():
        if has_lower_bound[name] and low >= high:
            yield _problem(
                f"{section}.min_{name} is {low:g}, expected a value below max_{name}, which is {high:g}; null is the "
                f"value of mode {mode}",
                f"{section}.min_{name}",
                f"{section}.max_{name}",
            )


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, keys=tuple(parts(key) for key in keys))
