"""From a run's configuration to verl's.

verl's packaged configuration, over it what mapping.yaml makes of astuner's keys and what machine.yaml has for the
machine, over that the `verl:` section.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig, OmegaConf, open_dict

from astuner.backbone.handed_through import given_values, problems_with
from astuner.backbone.key_mapping import PLAIN, bare
from astuner.backbone.verl.mapping import machine_mapping, verl_mapping
from astuner.backbone.verl.plan import VerlPlan
from astuner.backbone.verl.rules import GPUS_PER_NODE, RULES, is_cut, trainers_per_node
from astuner.config.composition import origin_of, own_hydra
from astuner.config.keys import dotted, parts, value_at
from astuner.config.problems import Problem, raise_problems
from astuner.config.root import AstunerConfig, RunConfig
from astuner.errors import BackboneError

__all__ = ["VerlPlan", "compose_verl_config", "packaged_config"]


def compose_verl_config(config: RunConfig, plan: VerlPlan) -> DictConfig:
    """Return the configuration that verl's trainer takes; it is in Hydra's struct mode and unresolved.

    Args:
        config: as loaded, names resolved.
        plan: what it leaves open.

    Raises:
        ConfigError: the `verl:` section names a key that verl does not have or one that astuner sets, or a key of
            astuner does not go with the device; with the place of each.
        BackboneError: verl is not installed.
    """
    composed = packaged_config()
    given = given_values(config.verl, "verl", composed)
    raise_problems([*problems_with(given, verl_mapping(), composed, plan.origins), *_unfit(config, plan)])
    with open_dict(composed):
        for key, value in {**_mapped(config, plan), **_for_machine(config, plan)}.items():
            OmegaConf.update(composed, bare(key), value, merge=False, force_add=True)
        for one in given:
            OmegaConf.update(composed, dotted(one.path), one.value, merge=False, force_add=True)
    return composed


def packaged_config() -> DictConfig:
    """Return verl's configuration as it is packaged.

    Raises:
        BackboneError: verl is not installed.
    """
    spec = find_spec("verl")
    if spec is None or spec.origin is None:
        raise BackboneError("backbone 'verl' needs verl, not installed here; run: astuner install verl")
    folder = Path(spec.origin).parent / "trainer" / "config"
    with own_hydra(), initialize_config_dir(str(folder), version_base="1.3"):
        return compose("ppo_trainer")


def _mapped(config: RunConfig, plan: VerlPlan) -> dict[str, object]:
    """verl key to value, of mapping.yaml."""
    mapping, run = verl_mapping(), config.astuner
    values: dict[str, object] = {}
    for key, (rule, source) in mapping.rules().items():
        values[key] = _plain(value_at(config, source)) if rule == PLAIN else RULES[rule](run, plan)
    values |= {key: RULES[rule](run, plan) for key, rule in mapping.facts.items()}
    return values | {key: fixed.value for key, fixed in mapping.fixed.items()}


def _for_machine(config: RunConfig, plan: VerlPlan) -> Mapping[str, object]:
    machine, run = machine_mapping(), config.astuner
    values = dict(machine.everywhere)
    if plan.device == "cpu" or not plan.flash_attention:
        values |= machine.without_flash_attention
    if plan.device == "cpu":
        values |= machine.cpu
        if run.trainer_common.ray_address is None and plan.ray is None:
            values |= machine.own_ray
            values |= {key: RULES[rule](run, plan) for key, rule in machine.own_ray_facts.items()}
    return values


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def _unfit(config: RunConfig, plan: VerlPlan) -> Iterator[Problem]:
    """What can be judged only when device and engine are known."""
    run = config.astuner
    engine, ulysses = "astuner.rollout.name", "astuner.trainer_common.ulysses_sequence_parallel_size"
    if plan.device == "cpu" and run.trainer_common.ulysses_sequence_parallel_size > 1:
        reason = "Ulysses needs packed rows and flash-attention, and so CUDA; write 1 or remove the line"
        yield _problem(plan, ulysses, f"{ulysses} does not go with a CPU: {reason}")
    if plan.device == "cuda" and not plan.flash_attention and run.trainer_common.ulysses_sequence_parallel_size > 1:
        reason = "Ulysses needs packed rows, and flash-attention does not import here; install flash-attn or write 1"
        yield _problem(plan, ulysses, f"{ulysses} is {run.trainer_common.ulysses_sequence_parallel_size}: {reason}")
    if plan.device == "cuda" and plan.rollout_engine == "embedded":
        yield _problem(plan, engine, f"{engine} is 'embedded', which this backbone offers on a CPU only; write vllm")
    if plan.rollout_engine == "vllm" and is_cut(run.rollout) and run.rollout.temperature != 1:
        key = "astuner.rollout.top_p" if run.rollout.top_p < 1 else "astuner.rollout.top_k"
        reason = "vLLM has no logprobs that are after temperature and before the cut, as the trainer's are"
        mend = "write rollout.temperature: 1, or remove the line"
        yield _problem(plan, key, f"{key} goes with a temperature of 1 only on vLLM: {reason}; {mend}")
    yield from _uncounted(run, plan)
    gpus = trainers_per_node(run, plan) * run.trainer_common.nnodes
    engines = "astuner.rollout.tensor_model_parallel_size"
    for key in (engines,) if plan.device == "cpu" else (engines, ulysses):
        share = value_at(config, parts(key))
        if isinstance(share, int) and gpus % share:
            text = f"{key} is {share}, which does not divide the {gpus} GPUs of nnodes × n_gpus_per_node"
            yield _problem(plan, key, text)


def _uncounted(run: AstunerConfig, plan: VerlPlan) -> Iterator[Problem]:
    """What asks a Ray that is started for the run, which is on this machine, for more GPUs than there are."""
    common = run.trainer_common
    if plan.device == "cpu" or common.ray_address is not None:
        return
    if common.nnodes > 1 and (plan.ray is None or not plan.ray.others_join):
        key = "astuner.trainer_common.nnodes"
        mend = "start a Ray cluster and give its ray_address, use --with-ray-cluster, or write 1"
        yield _problem(plan, key, f"{key} is {common.nnodes}, and a Ray started for the run is on one machine; {mend}")
    wanted = trainers_per_node(run, plan)
    if wanted > plan.gpus:
        text = f"{GPUS_PER_NODE} is {wanted}, and this machine has {plan.gpus}; write that or less"
        yield _problem(plan, GPUS_PER_NODE, text)


def _problem(plan: VerlPlan, key: str, text: str) -> Problem:
    return Problem(text, origin_of(plan.origins, parts(key)), keys=(parts(key),))
