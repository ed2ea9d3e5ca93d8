"""verl's configuration of a run: its packaged configuration, the run's values, the user's `verl:` section."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from astuner.backbone.base import missing_packages
from astuner.backbone.packing.attention import attention_error, flash_attention_command, undivided_heads
from astuner.backbone.packing.packed_attention import SUPPORTED_MODELS
from astuner.backbone.training.declarations import all_fields, engine_argument_errors, field_errors, verl_classes
from astuner.backbone.training.trainer_section import (
    TrainerOverride,
    leaf_overrides,
    override_problem,
    override_problems,
    split_shared_mappings,
    trainer_overrides,
)
from astuner.backbone.verl.rules import VerlRunFacts, trainers_per_node
from astuner.config.composition import isolated_hydra
from astuner.config.keys import KeyPath, dotted, parts, value_at
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.trainer_mapping import trainer_mapping
from astuner.config.validation import Problem, origin_of, raise_problems

_ATTENTION = ("actor_rollout_ref", "model", "override_config", "attn_implementation")
_ENGINE_ARGS = ("actor_rollout_ref", "rollout", "engine_kwargs", "vllm")
_STRATEGIES = tuple(
    ("actor_rollout_ref", *section, "strategy")
    for section in (("actor",), ("ref",), ("actor", "fsdp_config"), ("ref", "fsdp_config"))
)
_MODEL = ("actor_rollout_ref", "model")
# The values that `update.pack: tree` requires, with the reasons.
_TREE_REQUIRES: dict[KeyPath, tuple[object, str]] = {
    _ATTENTION: ("sdpa", "prefixes are shared by astuner's attention, which replaces sdpa"),
    (*_MODEL, "use_remove_padding"): (True, "padded rows share no prefixes"),
    (*_MODEL, "use_fused_kernels"): (False, "the fused head computes one next token for each token"),
    ("actor_rollout_ref", "actor", "fsdp_config", "pad_to_length"): (False, "sequences of fixed length are rows"),
}
_GPUS_PER_NODE = "astuner.trainer_common.n_gpus_per_node"


def compose_verl_config(config: RunConfig, facts: VerlRunFacts) -> DictConfig:
    """Return the configuration of verl's trainer, in Hydra's struct mode and with references unresolved.

    Args:
        config: the configuration, with the names and folders from `resolve_names`.

    Raises:
        ConfigError: the `verl:` section has a key that verl does not have or that astuner sets, or a key of astuner
            does not fit the machine. The message states where each key is set.
        BackboneError: verl is not installed.
    """
    composed, mapping = packaged_config(), trainer_mapping("verl")
    values = mapping.values(config, facts, _machine(config.astuner, facts))
    overrides = list(split_shared_mappings(trainer_overrides(config.verl, "verl", composed), values))
    problems = [*override_problems(overrides, mapping, values, composed, facts.origins)]
    problems += [*_value_problems(overrides, composed, facts), *machine_problems(config, facts)]
    raise_problems([*problems, *tree_problems(config, facts, overrides)])
    with open_dict(composed):
        for name, value in values.items():
            OmegaConf.update(composed, name.removeprefix("+"), value, merge=False, force_add=True)
        for override in overrides:
            OmegaConf.update(composed, dotted(override.path), override.value, merge=False, force_add=True)
    return composed


def packaged_config() -> DictConfig:
    """Return the configuration in verl's package; raise BackboneError if verl is not installed."""
    return copy.deepcopy(_packaged_config())


@cache
def _packaged_config() -> DictConfig:
    """Return the configuration, composed once: it has dozens of files, and a run needs it three times."""
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise missing_packages("verl", ["verl"])
    folder = Path(spec.origin).parent / "trainer" / "config"
    with isolated_hydra(), initialize_config_dir(str(folder), version_base="1.3"):
        return compose("ppo_trainer")


def _value_problems(
    overrides: Sequence[TrainerOverride], packaged: DictConfig, facts: VerlRunFacts
) -> Iterator[Problem]:
    has_flash_attention = facts.flash_attention and facts.device == "cuda"
    for override in overrides:
        for text in _field_errors(override, packaged):
            yield override_problem(override, trainer_mapping("verl"), text, facts.origins)
    for override in leaf_overrides(overrides):
        name, text = dotted(("verl", *override.path)), ""
        if override.path == _ATTENTION:
            text = attention_error(name, override.value, flash_attention=has_flash_attention)
        if override.path in _STRATEGIES and override.value not in ("fsdp", "fsdp2"):
            reason = "astuner's keys are mapped to verl's FSDP engine"
            text = f"{name} is {override.value!r}; expected 'fsdp' or 'fsdp2': {reason}"
        if text:
            yield override_problem(override, trainer_mapping("verl"), text, facts.origins)


def _field_errors(override: TrainerOverride, packaged: DictConfig) -> Iterator[str]:
    path, name = override.path, ("verl", *override.path)
    if path[: len(_ENGINE_ARGS)] == _ENGINE_ARGS:
        yield from engine_argument_errors(name[: len(_ENGINE_ARGS) + 1], path[len(_ENGINE_ARGS) :], override.value)
        return
    for end in range(len(path) - 1, 0, -1):
        section = OmegaConf.select(packaged, dotted(path[:end]))
        if isinstance(section, DictConfig) and "_target_" in section:
            classes, target = verl_classes(), section._get_node("_target_")
            cls = str(target).rpartition(".")[2]
            # verl renames some keys of the reference model before it converts the section.
            is_listed = path[end] in section and path[end] not in all_fields(classes, cls)
            if cls in classes and not is_listed:
                yield from field_errors(classes, cls, name[: end + 1], path[end:], override.value)
            return


def _machine(run: AstunerConfig, facts: VerlRunFacts) -> Iterator[str]:
    yield "always"
    has_flash_attention = facts.device == "cuda" and facts.flash_attention
    if not has_flash_attention or run.update.pack == "tree":
        yield "without_flash_attention"
    if not has_flash_attention and not facts.packed_attention:
        yield "without_packed_attention"
    if facts.device == "cpu":
        yield "cpu"
        if run.trainer_common.ray_address is None and facts.ray is None:
            yield "cpu_own_ray"


def machine_problems(config: RunConfig, facts: VerlRunFacts) -> Iterator[Problem]:
    """Yield the values that do not fit the device, the engine or the number of GPUs."""
    run = config.astuner
    ulysses = "astuner.trainer_common.ulysses_sequence_parallel_size"
    if facts.device == "cpu" and run.trainer_common.ulysses_sequence_parallel_size > 1:
        reason = "Ulysses needs packed rows and flash-attention, and so CUDA; write 1 or remove the line"
        yield _problem(facts, ulysses, f"{ulysses} is not supported on a CPU: {reason}")
    if facts.device == "cuda" and not facts.flash_attention and run.trainer_common.ulysses_sequence_parallel_size > 1:
        reason = "Ulysses needs packed rows, and flash-attention cannot be imported"
        text = f"{ulysses} is {run.trainer_common.ulysses_sequence_parallel_size}: {reason}"
        yield _problem(facts, ulysses, f"{text}; write 1, or run: {flash_attention_command()}")
    if facts.rollout_engine == "vllm" and run.rollout.is_cut and run.rollout.temperature != 1:
        key = "astuner.rollout.top_p" if run.rollout.top_p < 1 else "astuner.rollout.top_k"
        reason = "vLLM cannot return logprobs after temperature and before the cut, which is what the trainer computes"
        fix = "write rollout.temperature: 1, or remove the line"
        yield _problem(facts, key, f"{key} requires a temperature of 1 on vLLM: {reason}; {fix}")
    if facts.device == "cuda":
        yield from (_problem(facts, key, text) for key, text in undivided_heads(run, facts.heads))
    yield from _missing_gpus(run, facts)
    gpus = trainers_per_node(run, facts) * run.trainer_common.nnodes
    engines = "astuner.rollout.tensor_model_parallel_size"
    for key in (engines,) if facts.device == "cpu" else (engines, ulysses):
        share = value_at(config, parts(key))
        if isinstance(share, int) and gpus % share:
            text = f"{key} is {share}, which does not divide the {gpus} GPUs of nnodes × n_gpus_per_node"
            yield _problem(facts, key, text)


def tree_problems(config: RunConfig, facts: VerlRunFacts, overrides: Iterable[TrainerOverride]) -> Iterator[Problem]:
    """Yield what makes `update.pack: tree` impossible."""
    key, ulysses = "astuner.update.pack", "astuner.trainer_common.ulysses_sequence_parallel_size"
    if config.astuner.update.pack != "tree":
        return
    fix = "write auto or leaf, which compute each timeline once"
    if not facts.packed_attention:
        text = f"{key} is tree, but the model is not among those whose attention can be packed ({SUPPORTED_MODELS})"
        yield _problem(facts, key, f"{text}; {fix}")
    if config.astuner.trainer_common.ulysses_sequence_parallel_size > 1:
        reason = "Ulysses divides each row over several GPUs, and a prefix that rows share belongs to all of them"
        yield _problem(facts, key, f"{key} is tree, and {ulysses} is above 1: {reason}; {fix}, or write 1 for Ulysses")
    for override in leaf_overrides(overrides):
        required = _TREE_REQUIRES.get(override.path)
        if required is not None and override.value != required[0]:
            reason = required[1]
            name = dotted(("verl", *override.path))
            text = f"{name} is {override.value!r}, and {key} is tree: {reason}; remove the line"
            yield override_problem(override, trainer_mapping("verl"), text, facts.origins)


def _missing_gpus(run: AstunerConfig, facts: VerlRunFacts) -> Iterator[Problem]:
    """Yield a problem if a Ray cluster started for the run, which is on this machine, has fewer GPUs than requested."""
    common = run.trainer_common
    if facts.device == "cpu" or common.ray_address is not None:
        return
    if common.nnodes > 1 and (facts.ray is None or not facts.ray.others_join):
        key = "astuner.trainer_common.nnodes"
        fix = "start a Ray cluster and set its ray_address, use --with-ray-cluster, or write 1"
        text = f"{key} is {common.nnodes}, and the Ray cluster started for a run is on one machine; {fix}"
        yield _problem(facts, key, text)
    gpus = trainers_per_node(run, facts)
    if gpus > facts.gpus:
        text = f"{_GPUS_PER_NODE} is {gpus}, and this machine has {facts.gpus}; write that or less"
        yield _problem(facts, _GPUS_PER_NODE, text)


def _problem(facts: VerlRunFacts, key: str, text: str) -> Problem:
    return Problem(text, origin_of(facts.origins, parts(key)), keys=(parts(key),))
