"""What of a run's configuration can be judged only when device and engine are known."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.backbone.lora import TINKER_ALPHA
from astuner.backbone.trinity.plan import TrinityPlan
from astuner.backbone.trinity.rules import GPUS_PER_NODE, gpus_per_node, steps_ahead
from astuner.config.composition import origin_of
from astuner.config.keys import parts
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig, RunConfig

_ENGINES = "astuner.rollout.n_vllm_engine"
_LORA = "astuner.model.lora"
_STYLE = "astuner.asynchrony.sync_style"
FEWEST_GPUS = 2
"""For an engine and for the trainer, which have their own."""


def unfit(config: RunConfig, plan: TrinityPlan) -> Iterator[Problem]:
    """Find what does not go with the machine, or with Trinity's trainer there."""
    run = config.astuner
    if run.asynchrony.sync_style == "fully_async" and plan.validates:
        reason = "Trinity validates between steps, and fully_async has no such moment"
        mend = "write explorer_driven or trainer_driven, or name no validation tasks"
        yield _problem(plan, _STYLE, f"{_STYLE} is 'fully_async', and the run has validation tasks: {reason}; {mend}")
    if run.asynchrony.sync_style == "fully_async" and steps_ahead(run) < 1:
        reason = "Trinity hands over what it has sampled only once it may begin more"
        mend = "write a larger astuner.asynchrony.max_staleness, or another sync_style"
        yield _problem(plan, _STYLE, f"{_STYLE} is 'fully_async', and no step may run ahead: {reason}; {mend}")
    every, interval = run.trainer_common.test_freq, run.asynchrony.sync_interval
    if run.asynchrony.sync_style == "trainer_driven" and plan.mode == "both" and plan.validates and every % interval:
        key = "astuner.trainer_common.test_freq"
        reason = "the trainer hands its weights over after such steps only, and others would be validated"
        mend = "write a multiple, or sync_style: explorer_driven"
        yield _problem(plan, key, f"{key} is {every}, no multiple of sync_interval, {interval}: {reason}; {mend}")
    yield from _not_by_tinker(run, plan) if plan.uses_tinker else _not_on_gpus(run, plan)


def _not_by_tinker(run: AstunerConfig, plan: TrinityPlan) -> Iterator[Problem]:
    """What a Tinker service cannot be told."""
    if run.rollout.name == "vllm":
        key = "astuner.rollout.name"
        yield _problem(plan, key, f"{key} is 'vllm', and here a Tinker service samples; write auto")
    if plan.mode == "both" and run.rollout.temperature not in (0.0, 1.0):
        key = "astuner.rollout.temperature"
        text = (
            f"{key} is {run.rollout.temperature}, and a Tinker service trains the model's own distribution, at "
            "temperature 1: each ratio would be between two distributions, and be clipped for that; write 1.0"
        )
        yield _problem(plan, key, text)
    lora = run.model.lora
    if lora.rank and lora.target_modules != "all-linear":
        key = f"{_LORA}.target_modules"
        reason = "a Tinker service knows only train_attn, train_mlp and train_unembed; write all-linear, and give those"
        yield _problem(plan, key, f"{key} is {lora.target_modules!r}: {reason} under trinity.model.tinker")
    if lora.rank and lora.alpha != TINKER_ALPHA:
        key = f"{_LORA}.alpha"
        yield _problem(plan, key, f"{key} is {lora.alpha}, and a Tinker service has {TINKER_ALPHA}; write that")


def _not_on_gpus(run: AstunerConfig, plan: TrinityPlan) -> Iterator[Problem]:
    """What vLLM and verl's workers, on GPUs of their own each, cannot do."""
    common, lora = run.trainer_common, run.model.lora
    if run.model.dtype == "float32":
        key = "astuner.model.dtype"
        yield _problem(plan, key, f"{key} is 'float32', and Trinity's trainer computes in bfloat16 on GPUs; write auto")
    if lora.rank:
        key = f"{_LORA}.rank"
        reason = "vLLM's server under Trinity answers with the model below the adapters"
        mend = "write 0 to train all weights, use --backbone=verl, or name a Tinker service"
        yield _problem(plan, key, f"{key} is {lora.rank}: {reason}; {mend}")
    if common.ray_address is None and common.nnodes > 1:
        key = "astuner.trainer_common.nnodes"
        mend = "start a Ray cluster and give its ray_address, or write 1"
        yield _problem(plan, key, f"{key} is {common.nnodes}, and a Ray started for the run is on one machine; {mend}")
    per_node = gpus_per_node(run, plan)
    if common.ray_address is None and per_node > plan.gpus:
        text = f"{GPUS_PER_NODE} is {per_node}, and this machine has {plan.gpus}; write that or less"
        yield _problem(plan, GPUS_PER_NODE, text)
    yield from _unshared(run, plan, per_node * common.nnodes, per_node)


def _unshared(run: AstunerConfig, plan: TrinityPlan, gpus: int, per_node: int) -> Iterator[Problem]:
    """Whether the GPUs can be shared out between engines and trainer."""
    if gpus < FEWEST_GPUS:
        reason = "engines and trainer have GPUs of their own here, so there have to be two at least"
        mend = "use --backbone=verl, which shares one, or write trainer_common.device: cpu"
        yield _problem(plan, GPUS_PER_NODE, f"too few GPUs ({gpus}): {reason}; {mend}")
        return
    size = run.rollout.tensor_model_parallel_size
    sampling = run.rollout.n_vllm_engine * size
    if sampling >= gpus:
        text = (
            f"{_ENGINES} ({run.rollout.n_vllm_engine}) × tensor_model_parallel_size ({size}) = {sampling} of {gpus} "
            "GPUs, which leaves none for the trainer; lower one of them"
        )
        yield _problem(plan, _ENGINES, text)
        return
    training = gpus - sampling
    if training > per_node and training % per_node:
        text = (
            f"{_ENGINES} × tensor_model_parallel_size = {sampling} GPUs leaves {training} for the trainer, which "
            f"takes whole machines of {per_node} where it takes more than one; write such a number of engines"
        )
        yield _problem(plan, _ENGINES, text)
    ulysses = run.trainer_common.ulysses_sequence_parallel_size
    if training % ulysses:
        key = "astuner.trainer_common.ulysses_sequence_parallel_size"
        yield _problem(plan, key, f"{key} is {ulysses}, which does not divide the {training} GPUs of the trainer")


def _problem(plan: TrinityPlan, key: str, text: str) -> Problem:
    return Problem(text, origin_of(plan.origins, parts(key)), keys=(parts(key),))
