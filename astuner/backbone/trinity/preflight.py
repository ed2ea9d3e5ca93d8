"""Checks of a configuration that depend on the device, the engine and the number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.backbone.training.lora import TINKER_ALPHA
from astuner.backbone.trinity.rules import gpus_per_node, steps_ahead
from astuner.backbone.trinity.run_facts import TrinityRunFacts
from astuner.config.composition import origin_of
from astuner.config.keys import parts
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig, RunConfig

_GPUS_PER_NODE = "astuner.trainer_common.n_gpus_per_node"
_ENGINES = "astuner.rollout.n_vllm_engine"
_LORA = "astuner.model.lora"
_STYLE = "astuner.asynchrony.sync_style"
MIN_GPUS = 2
"""Engines and trainer need at least one GPU each."""


def machine_problems(config: RunConfig, facts: TrinityRunFacts) -> Iterator[Problem]:
    """Yield the values that do not fit the machine, or Trinity's trainer on it."""
    run = config.astuner
    if run.asynchrony.sync_style == "fully_async" and facts.validates:
        reason = "Trinity validates between steps, which fully_async does not separate"
        fix = "write explorer_driven or trainer_driven, or configure no validation tasks"
        yield _problem(facts, _STYLE, f"{_STYLE} is 'fully_async', and the run has validation tasks: {reason}; {fix}")
    if run.asynchrony.sync_style == "fully_async" and steps_ahead(run) < 1:
        reason = "Trinity passes on samples only when it may start another batch"
        fix = "write a larger astuner.asynchrony.max_staleness, or another sync_style"
        yield _problem(facts, _STYLE, f"{_STYLE} is 'fully_async', and no step may run ahead: {reason}; {fix}")
    every, interval = run.trainer_common.test_freq, run.asynchrony.sync_interval
    if run.asynchrony.sync_style == "trainer_driven" and facts.mode == "both" and facts.validates and every % interval:
        key = "astuner.trainer_common.test_freq"
        reason = "the trainer syncs its weights only after such steps, and older weights would be validated"
        fix = "write a multiple, or sync_style: explorer_driven"
        yield _problem(facts, key, f"{key} is {every}, not a multiple of sync_interval ({interval}): {reason}; {fix}")
    yield from _tinker_problems(run, facts) if facts.uses_tinker else _gpu_problems(run, facts)


def _tinker_problems(run: AstunerConfig, facts: TrinityRunFacts) -> Iterator[Problem]:
    """Yield the values that a Tinker service does not support."""
    if run.rollout.name == "vllm":
        key = "astuner.rollout.name"
        yield _problem(facts, key, f"{key} is 'vllm', and a Tinker service samples in this run; write auto")
    if facts.mode == "both" and run.rollout.temperature not in (0.0, 1.0):
        key = "astuner.rollout.temperature"
        text = (
            f"{key} is {run.rollout.temperature}, and a Tinker service trains the model's own distribution, at "
            "temperature 1: each ratio would compare two distributions and be clipped for that; write 1.0"
        )
        yield _problem(facts, key, text)
    lora = run.model.lora
    if lora.rank and lora.target_modules != "all-linear":
        key = f"{_LORA}.target_modules"
        reason = "a Tinker service supports only train_attn, train_mlp and train_unembed; write all-linear, and these"
        yield _problem(facts, key, f"{key} is {lora.target_modules!r}: {reason} under trinity.model.tinker")
    if lora.rank and lora.alpha != TINKER_ALPHA:
        key = f"{_LORA}.alpha"
        yield _problem(facts, key, f"{key} is {lora.alpha}, and a Tinker service has {TINKER_ALPHA}; write that")


def _gpu_problems(run: AstunerConfig, facts: TrinityRunFacts) -> Iterator[Problem]:
    """Yield the values that vLLM and verl's workers, each with their own GPUs, do not support."""
    common, lora = run.trainer_common, run.model.lora
    if run.model.dtype == "float32":
        key = "astuner.model.dtype"
        yield _problem(facts, key, f"{key} is 'float32', and Trinity's trainer uses bfloat16 on GPUs; write auto")
    if lora.rank:
        key = f"{_LORA}.rank"
        reason = "vLLM's server under Trinity answers without the adapters"
        fix = "write 0 to train all weights, use --backbone=verl, or configure a Tinker service"
        yield _problem(facts, key, f"{key} is {lora.rank}: {reason}; {fix}")
    if common.ray_address is None and common.nnodes > 1:
        key = "astuner.trainer_common.nnodes"
        fix = "start a Ray cluster and set its ray_address, or write 1"
        text = f"{key} is {common.nnodes}, and the Ray cluster started for a run is on one machine; {fix}"
        yield _problem(facts, key, text)
    per_node = gpus_per_node(run, facts)
    if common.ray_address is None and per_node > facts.gpus:
        text = f"{_GPUS_PER_NODE} is {per_node}, and this machine has {facts.gpus}; write that or less"
        yield _problem(facts, _GPUS_PER_NODE, text)
    yield from _gpu_split_problems(run, facts, per_node * common.nnodes, per_node)


def _gpu_split_problems(run: AstunerConfig, facts: TrinityRunFacts, gpus: int, per_node: int) -> Iterator[Problem]:
    """Yield a problem if the GPUs cannot be divided between engines and trainer."""
    if gpus < MIN_GPUS:
        reason = "engines and trainer need at least one GPU each"
        fix = "use --backbone=verl, which shares one, or write trainer_common.device: cpu"
        yield _problem(facts, _GPUS_PER_NODE, f"too few GPUs ({gpus}): {reason}; {fix}")
        return
    size = run.rollout.tensor_model_parallel_size
    sampling = run.rollout.n_vllm_engine * size
    if sampling >= gpus:
        text = (
            f"{_ENGINES} ({run.rollout.n_vllm_engine}) × tensor_model_parallel_size ({size}) = {sampling} of {gpus} "
            "GPUs, which leaves none for the trainer; lower one of them"
        )
        yield _problem(facts, _ENGINES, text)
        return
    training = gpus - sampling
    if training > per_node and training % per_node:
        text = (
            f"{_ENGINES} × tensor_model_parallel_size = {sampling} GPUs leaves {training} for the trainer, which "
            f"needs whole machines of {per_node} if it uses more than one; write a number of engines that leaves those"
        )
        yield _problem(facts, _ENGINES, text)
    ulysses = run.trainer_common.ulysses_sequence_parallel_size
    if training % ulysses:
        key = "astuner.trainer_common.ulysses_sequence_parallel_size"
        yield _problem(facts, key, f"{key} is {ulysses}, which does not divide the {training} GPUs of the trainer")


def _problem(facts: TrinityRunFacts, key: str, text: str) -> Problem:
    return Problem(text, origin_of(facts.origins, parts(key)), keys=(parts(key),))
