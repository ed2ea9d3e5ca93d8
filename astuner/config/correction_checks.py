"""Checks and notices about `trainer_common.correction`."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.config.conditions import has_ratio, is_cut
from astuner.config.corrections import CORRECTIONS
from astuner.config.keys import parts
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig, RunConfig


def correction_problems(run: AstunerConfig) -> Iterator[Problem]:
    """Yield the contradictions between the keys of `trainer_common.correction` and between them and other keys."""
    correction, section = run.trainer_common.correction, "astuner.trainer_common.correction"
    mode = "none" if correction.mode == "auto" else correction.mode
    spec = CORRECTIONS[mode]
    if spec.weights and has_ratio(run) and correction.old_logprobs == "sampler":
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
    elif several and spec.weights and has_ratio(run):
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


def sampling_notices(config: RunConfig) -> Iterator[str]:
    """Yield a notice if top-p or top-k make the sampler differ from the policy that is trained."""
    run = config.astuner
    rollout = run.rollout
    if run.backbone == "debug" or run.trainer_common.algorithm.adv_estimator == "sft" or not is_cut(rollout):
        return
    cuts = [f"rollout.top_p is {rollout.top_p:g}"] * (rollout.top_p < 1)
    cuts += [f"rollout.top_k is {rollout.top_k}"] * (rollout.top_k > 0)
    factor = "by a factor that depends on the token" if rollout.top_k > 0 else f"up to {1 / rollout.top_p:.3g} times"
    yield (
        f"{' and '.join(cuts)}: the model samples from a part of its distribution, and a sampled token was more likely "
        f"than the trained policy assumes, {factor}. {_cut_correction(run)}"
    )


def _cut_correction(run: AstunerConfig) -> str:
    """Return whether the correction acts on the difference that top-p and top-k make."""
    correction = run.trainer_common.correction
    remedy = "write top_p: 1.0 and top_k: -1 to sample from the whole distribution"
    if run.backbone == "trinity" or (run.backbone == "verl" and run.rollout.name not in ("auto", "embedded")):
        return f"The engine does not return the probabilities that it sampled with, so nothing corrects this; {remedy}"
    if correction.mode == "none" or (
        correction.mode == "auto" and correction.old_logprobs == "sampler" and has_ratio(run)
    ):
        return f"Nothing corrects this, because trainer_common.correction is off; {remedy}"
    mode = "token_tis" if correction.mode == "auto" else correction.mode
    where = ", except with vLLM, which does not return the probabilities that it sampled with" * (
        run.backbone == "verl"
    )
    return f"trainer_common.correction ({mode}) corrects this{where}"


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, keys=tuple(parts(key) for key in keys))
