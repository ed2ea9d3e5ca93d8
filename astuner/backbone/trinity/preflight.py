"""Checks a configuration against the device, the engine and the number of GPUs."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.algorithms.registry import resolve
from astuner.backbone.packing.attention import flash_attention_command, undivided_heads
from astuner.backbone.training.tinker_policy import ALL_LINEAR, TinkerPolicy
from astuner.backbone.training.trainer_section import leaves
from astuner.backbone.trinity.rules import (
    TrinityRunFacts,
    engine_count,
    gpus_per_node,
    run_correction,
    sampler_dtype,
    steps_ahead,
)
from astuner.config.keys import parts
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.validation import Problem, origin_of

_GPUS_PER_NODE = "astuner.trainer_common.n_gpus_per_node"
_ENGINES = "astuner.rollout.n_vllm_engine"
_WORKERS = "astuner.rollout.max_env_worker"
_LORA = "astuner.model.lora"
_TRAINER = "astuner.trainer_common"
_STYLE = "astuner.asynchrony.sync_style"
# Engine and trainer compute different logprobs in bfloat16. The largest measured mean difference of an answer is 0.024.
_ROUNDING = 0.03
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
    workers, engines = run.rollout.max_env_worker, engine_count(run, uses_tinker=facts.uses_tinker)
    if workers < engines:
        text = f"{_WORKERS} is {workers}, less than {_ENGINES} ({engines}): some engines would have no episode"
        yield _problem(facts, _WORKERS, f"{text}; write at least {engines}, or fewer engines")
    if facts.mode == "both":
        yield from _ratio_problems(run, facts)
    yield from _tinker_problems(config, facts) if facts.uses_tinker else _gpu_problems(run, facts)


def _ratio_problems(run: AstunerConfig, facts: TrinityRunFacts) -> Iterator[Problem]:
    """Yield a clip range that the rounding of sampler and trainer exceeds, if the ratios contain it."""
    common, rule = run.trainer_common, resolve(run.trainer_common.algorithm).rule
    if rule is None or sampler_dtype(run, facts) == "float32" or run_correction(run, facts).old_from_trainer:
        return
    low, high = rule.clip.low, rule.clip.high
    if min(low, high) < _ROUNDING:
        is_chosen = common.correction.old_logprobs == "sampler"
        key = f"{_TRAINER}.correction.old_logprobs" if is_chosen else f"{_TRAINER}.mini_batch_num"
        value = common.correction.old_logprobs if is_chosen else common.mini_batch_num
        text = (
            f"{key} is {value}, so the ratios of {common.algorithm.adv_estimator} are to the sampler's logprobs, which "
            f"differ by up to {_ROUNDING:g} for an answer, and its clip range is {low:g} below and {high:g} above 1"
        )
        fix = "remove old_logprobs" if is_chosen else "write mini_batch_num: 1, use --backbone=verl"
        yield _problem(facts, key, f"{text}; {fix}, or set clip_ratio_low and clip_ratio_high to {_ROUNDING:g} or more")


def _tinker_problems(config: RunConfig, facts: TrinityRunFacts) -> Iterator[Problem]:
    run = config.astuner
    lora, stock = run.model.lora, TinkerPolicy()
    paths = [path for path, _ in leaves(config.trinity)]
    switches = [key for key in ("train_attn", "train_mlp", "train_unembed") if ("model", "tinker", key) in paths]
    if lora.rank and lora.target_modules != ALL_LINEAR and switches:
        key = f"{_LORA}.target_modules"
        names = " and ".join(f"trinity.model.tinker.{switch}" for switch in switches)
        text = f"{key} is {lora.target_modules!r}, and {names} would select modules, too; remove one or the other"
        yield _problem(facts, key, text)
    coefficient = run.trainer_common.algorithm.entropy_coef
    if coefficient:
        key = "astuner.trainer_common.algorithm.entropy_coef"
        reason = "a Tinker service returns the logprobs of the sampled tokens only, without entropies"
        fix = "write 0.0, use --backbone=local or --backbone=verl, or train with trinity on GPUs"
        yield _problem(facts, key, f"{key} is {coefficient}: {reason}; {fix}")
    if facts.takes_policy or facts.mode != "both":
        return
    service = f"the Tinker service at {facts.tinker_base_url}"
    fix = "or remove trinity.model.tinker.base_url, so that the run starts its own server, which takes any"
    if run.rollout.temperature not in (0.0, stock.temperature):
        key = "astuner.rollout.temperature"
        reason = "so that each ratio would compare two distributions and be clipped for that"
        text = f"{key} is {run.rollout.temperature}, and {service} trains at temperature 1, {reason}"
        yield _problem(facts, key, f"{text}; write {stock.temperature}, {fix}")
    if not lora.rank:
        key = f"{_LORA}.rank"
        yield _problem(facts, key, f"{key} is 0, and {service} trains adapters only; write 32, {fix}")
    if lora.rank and lora.target_modules != ALL_LINEAR:
        key = f"{_LORA}.target_modules"
        text = f"{key} is {lora.target_modules!r}, and {service} takes only train_attn, train_mlp and train_unembed"
        yield _problem(facts, key, f"{text}; write all-linear and these under trinity.model.tinker, {fix}")
    if lora.rank and lora.alpha != stock.lora_alpha:
        key = f"{_LORA}.alpha"
        text = f"{key} is {lora.alpha}, and {service} has {stock.lora_alpha}; write {stock.lora_alpha}, {fix}"
        yield _problem(facts, key, text)


def _gpu_problems(run: AstunerConfig, facts: TrinityRunFacts) -> Iterator[Problem]:
    common = run.trainer_common
    if run.model.dtype == "float32":
        key = "astuner.model.dtype"
        yield _problem(facts, key, f"{key} is 'float32', and Trinity's trainer uses bfloat16 on GPUs; write auto")
    if common.ray_address is None and common.nnodes > 1:
        key = "astuner.trainer_common.nnodes"
        fix = "start a Ray cluster and set its ray_address, or write 1"
        text = f"{key} is {common.nnodes}, and the Ray cluster started for a run is on one machine; {fix}"
        yield _problem(facts, key, text)
    yield from (_problem(facts, key, text) for key, text in undivided_heads(run, facts.heads))
    per_node = gpus_per_node(run, facts)
    if common.ray_address is None and per_node > facts.gpus:
        text = f"{_GPUS_PER_NODE} is {per_node}, and this machine has {facts.gpus}; write that or less"
        yield _problem(facts, _GPUS_PER_NODE, text)
    yield from _gpu_split_problems(run, facts, per_node * common.nnodes, per_node)


def _gpu_split_problems(run: AstunerConfig, facts: TrinityRunFacts, gpus: int, per_node: int) -> Iterator[Problem]:
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
    key = "astuner.trainer_common.ulysses_sequence_parallel_size"
    if ulysses > 1 and not facts.flash_attention:
        reason = "Ulysses needs packed rows, and flash-attention cannot be imported"
        yield _problem(facts, key, f"{key} is {ulysses}: {reason}; write 1, or run: {flash_attention_command()}")
    if training % ulysses:
        yield _problem(facts, key, f"{key} is {ulysses}, which does not divide the {training} GPUs of the trainer")


def _problem(facts: TrinityRunFacts, key: str, text: str) -> Problem:
    return Problem(text, origin_of(facts.origins, parts(key)), keys=(parts(key),))
