"""verl's configuration as composed from real packaged defaults: key by key, on a CPU, and with a `verl:` section."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import DictConfig, OmegaConf

from astuner.backbone.verl.rules import VerlRunFacts
from astuner.backbone.verl.trainer_config import compose_verl_config, packaged_config
from astuner.config.algorithms import ALGORITHMS
from astuner.config.keys import KeyPath, dotted, schema
from astuner.config.loading import load_config, with_values
from astuner.config.root import RunConfig
from astuner.config.trainer_mapping import trainer_mapping
from astuner.errors import ConfigError
from tests.backbone.spec_pages import PAGES, write_project
from tests.backbone.verl.plans import CPU, GPU, run_config

pytestmark = pytest.mark.verl

MAPPING = trainer_mapping("verl")
SETTING = [path for path, keys in MAPPING.trainer_keys.items() if any(key.kind != "from_run" for key in keys)]
BASE: dict[str, object] = {
    "trainer_common__max_tokens_per_micro_batch": 20000,
    "trainer_common__mini_batch_num": 2,
    "rollout__temperature": 1.0,  # with another, vLLM takes no top_p
    "rollout__val_kwargs__do_sample": True,  # greedy validation has one episode per task
    "rollout__val_kwargs__temperature": 0.5,
    "trainer_common__ray_address": "auto",  # so that the GPUs of this machine are no bound
}
OTHERS: dict[str, tuple[object, ...]] = {
    "astuner.data.train_batch_size": (64,),
    "astuner.model.lora.target_modules": ("q_proj", ["q_proj", "v_proj"]),
    "astuner.rollout.gpu_memory_utilization": (0.8,),
    "astuner.rollout.max_model_len": (30000,),
    "astuner.rollout.val_kwargs.do_sample": (False,),
    "astuner.rollout.val_kwargs.num_repeat": (9,),
    "astuner.rollout.val_kwargs.temperature": (0.25, 0.0),
    "astuner.trainer_common.mini_batch_num": (4,),
    "astuner.trainer_common.optim.betas": ((0.8, 0.99),),
    "astuner.trainer_common.kl_loss_coef": (0.5, 0.0),
    "astuner.trainer_common.ray_address": ("10.0.0.1:6379",),
    # The share of the longest sample on each of several GPUs counts only where it is the larger.
    "astuner.trainer_common.max_tokens_per_micro_batch": (24000,),
}


def flat(config: DictConfig) -> dict[str, object]:
    """Every value by its dotted key, references as they are written."""
    values: dict[str, object] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}{key}.")
        else:
            values[prefix[:-1]] = node

    walk(OmegaConf.to_container(config, resolve=False), "")
    return values


def changed_keys(before: DictConfig, after: DictConfig, mapped: set[str]) -> set[str]:
    """The verl keys that differ; for what is set as a mapping, the key of the mapping."""
    old, new = flat(before), flat(after)
    differ = {key for key in old.keys() | new.keys() if old.get(key, "absent") != new.get(key, "absent")}
    return {next((parent for parent in mapped if key.startswith(f"{parent}.")), key) for key in differ}


def other_values(path: KeyPath) -> tuple[object, ...]:
    """Values of a key that are not its default."""
    if dotted(path) in OTHERS:
        return OTHERS[dotted(path)]
    key = schema().keys[path]
    choices = get_args(key.annotation)
    if isinstance(key.default, bool):
        return (not key.default,)
    if isinstance(key.default, str) and choices:
        return ("auto", "seq_mis", "k3_rs") if path[-1] == "mode" else tuple(c for c in choices if c != key.default)
    if isinstance(key.default, int):
        return (key.default + 1,) if key.default >= 0 else (5,)
    if isinstance(key.default, float):
        return (key.default / 2 + 0.125,)
    return ("something_else",) if isinstance(key.default, str) else OTHERS_BY_NULL[path[-1]]


OTHERS_BY_NULL: dict[str, tuple[object, ...]] = {
    "n_gpus_per_node": (4,),
    "clip_ratio_low": (0.17,),
    "clip_ratio_high": (0.33,),
    "clip_ratio_dual": (2.5,),
    "loss_agg_mode": ("token-mean", "seq-mean-token-sum-norm"),
    "norm_adv_by_std": (False,),
    "max_weight": (9.0,),
    "min_weight": (0.25,),
    "max_rejection": (1.5,),
    "min_rejection": (0.25,),
}
# A bound of the correction acts in some modes only, and the mode selects the ratio in float32 only.
OTHER_BASES: dict[str, dict[str, object]] = {
    "mode": {"trainer_common__correction__mode": "none", "model__dtype": "float32"},
    "max_weight": {"trainer_common__correction__mode": "icepop"},
    "min_weight": {"trainer_common__correction__mode": "icepop"},
    "max_rejection": {"trainer_common__correction__mode": "geo_rs"},
    "min_rejection": {"trainer_common__correction__mode": "geo_rs"},
}


@pytest.fixture(scope="module")
def base() -> tuple[RunConfig, DictConfig]:
    config = run_config(**BASE)
    return config, compose_verl_config(config, GPU)


@pytest.mark.parametrize("path", SETTING, ids=dotted)
def test_a_key_changes_exactly_the_trainer_keys_that_it_declares(
    path: KeyPath, base: tuple[RunConfig, DictConfig]
) -> None:
    config, composed = base
    if path[-2] == "correction" and path[-1] in OTHER_BASES:
        config = run_config(**BASE, **OTHER_BASES[path[-1]])
        composed = compose_verl_config(config, GPU)
    named = {key.bare_name for key in MAPPING.trainer_keys[path] if key.kind != "from_run"}
    all_changes: set[str] = set()
    for value in other_values(path):
        if value == "sft":
            continue
        changes = changed_keys(composed, compose_verl_config(with_values(config, {dotted(path): value}), GPU), named)
        assert changes <= named, value
        all_changes |= changes
    if path[-1] == "ulysses_sequence_parallel_size":  # the second key depends on it only where samples are long
        long = run_config(rollout__max_model_len=100000)
        split = with_values(long, {dotted(path): 2})
        all_changes |= changed_keys(compose_verl_config(long, GPU), compose_verl_config(split, GPU), named)
    if path[-1] == "temperature":  # a temperature of 0 is greedy, which is not cut
        cut = with_values(config, {"astuner.rollout.top_p": 0.9})
        greedy = with_values(cut, {dotted(path): 0.0})
        all_changes |= changed_keys(compose_verl_config(cut, GPU), compose_verl_config(greedy, GPU), named)
    assert all_changes == named


def test_other_keys_change_nothing(base: tuple[RunConfig, DictConfig]) -> None:
    config, composed = base
    values = {
        dotted(path): other_values(path)[0]
        for path, key in schema().keys.items()
        if path not in SETTING and isinstance(key.default, bool | int | float) and not key.unsupported
    }
    assert len(values) > 10
    assert compose_verl_config(with_values(config, values), GPU) == composed


def test_trainer_keys_are_named_as_in_verl() -> None:
    """Without `+` where verl lists the key, with it where verl does not."""
    listed = packaged_config()
    names = {key.name for keys in MAPPING.trainer_keys.values() for key in keys} | {*MAPPING.facts, *MAPPING.fixed}
    names |= {name for group in MAPPING.machine.values() for name in (*group.values, *group.rules)}
    for key in names:
        *around, last = key.removeprefix("+").split(".")
        section: Any = listed
        for part in around:
            section = section[part]
        assert (last in list(section.keys())) is not key.startswith("+"), key
    for name in MAPPING.reserved:
        assert OmegaConf.select(listed, name, default="none") != "none", name


def test_facts_and_fixed_keys_have_their_values(base: tuple[RunConfig, DictConfig]) -> None:
    composed = base[1]
    assert composed.actor_rollout_ref.model.path == "/models/small"
    assert composed.actor_rollout_ref.rollout.name == "vllm"
    assert composed.trainer.device == "cuda"
    assert composed.trainer.default_local_dir == "/records/run/checkpoints"
    assert composed.trainer.total_training_steps == 7
    for key, fixed in MAPPING.fixed.items():
        assert OmegaConf.select(composed, key) == fixed.value


@pytest.mark.parametrize("plan", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - {"sft"}))
def test_verl_itself_takes_the_configuration(plan: VerlRunFacts, algorithm: str) -> None:
    pytest.importorskip("transfer_queue", reason="verl's own dependencies are not installed here")
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    config = run_config(trainer_common__algorithm__adv_estimator=algorithm, trainer_common__n_gpus_per_node=2)
    composed = compose_verl_config(config, plan)
    validate_config(composed, use_reference_policy=need_reference_policy(composed), use_critic=False)
    OmegaConf.resolve(composed)


@pytest.mark.parametrize("page", PAGES)
def test_verl_itself_takes_the_configuration_of_a_spec_page(
    page: str, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transfer_queue", reason="verl's own dependencies are not installed here")
    from verl.trainer.ppo.utils import need_reference_policy
    from verl.utils.config import validate_config

    write_project(tmp_path, model_folder)
    monkeypatch.chdir(tmp_path)
    (_, path, *overrides), _ = PAGES[page]
    loaded = load_config(Path(path), overrides, backbone="verl")
    composed = compose_verl_config(loaded.config, replace(CPU, model_path="model", origins=loaded.origins))
    validate_config(composed, use_reference_policy=need_reference_policy(composed), use_critic=False)
    OmegaConf.resolve(composed)
    rollout, run = composed.actor_rollout_ref.rollout, loaded.config.astuner
    assert (rollout.n, rollout.temperature) == (run.rollout.num_repeat, run.rollout.temperature)
    assert composed.actor_rollout_ref.actor.optim.lr == run.trainer_common.optim.lr


class StartedError(Exception):
    pass


def test_a_step_may_have_more_rows_than_verl_allows_by_default() -> None:
    pytest.importorskip("transfer_queue", reason="verl's own dependencies are not installed here")
    from transfer_queue.storage.simple_storage import SimpleStorageUnit

    class Unit(SimpleStorageUnit.__ray_metadata__.modified_class):
        def _init_zmq_socket(self) -> None:
            raise StartedError  # the memory is set up, and no port is opened

    default = packaged_config().transfer_queue.backend.SimpleStorage
    more = default.total_storage_size + 1
    numbers = list(range(more))
    for settings, is_refused in (
        (default, True),
        (compose_verl_config(run_config(), CPU).transfer_queue.backend.SimpleStorage, False),
        (compose_verl_config(run_config(), GPU).transfer_queue.backend.SimpleStorage, False),
    ):
        unit = object.__new__(Unit)
        with pytest.raises(StartedError):
            unit.__init__({**settings, "num_data_storage_units": 1})
        with pytest.raises(ValueError, match="capacity exceeded") if is_refused else contextlib.nullcontext():
            unit.storage_data.put_data({"row": numbers}, numbers)
        assert unit.storage_data.active_key_count == (0 if is_refused else more)


def test_a_cpu_has_the_values_of_a_cpu() -> None:
    composed = compose_verl_config(run_config(), replace(CPU, packed_attention=False))
    expected = {name: value for group in MAPPING.machine.values() for name, value in group.values.items()}
    expected |= {"ray_kwargs.ray_init.num_gpus": 1}
    for key, value in expected.items():
        assert OmegaConf.select(composed, key.removeprefix("+")) == value, key
    assert composed.actor_rollout_ref.rollout.name == "astuner_embedded"
    on_vllm = compose_verl_config(run_config(), replace(CPU, rollout_engine="vllm"))
    assert on_vllm.actor_rollout_ref.rollout.name == "vllm"
    two = compose_verl_config(run_config(trainer_common__n_gpus_per_node=2), CPU)
    assert (two.trainer.n_gpus_per_node, two.ray_kwargs.ray_init.num_gpus) == (2, 2)


def test_every_machine_has_the_tested_version_of_fsdp(base: tuple[RunConfig, DictConfig]) -> None:
    actor, ref = base[1].actor_rollout_ref.actor, base[1].actor_rollout_ref.ref
    assert {actor.strategy, actor.fsdp_config.strategy, ref.fsdp_config.strategy} == {"fsdp2"}


def test_rows_are_packed_where_the_attention_allows_it(base: tuple[RunConfig, DictConfig]) -> None:
    without = replace(GPU, flash_attention=False)
    tree = run_config(update__pack="tree")
    for config, facts, packs, attention in (
        (base[0], GPU, True, None),
        (base[0], replace(GPU, packed_attention=False), True, None),
        (base[0], without, True, "sdpa"),
        (base[0], replace(without, packed_attention=False), False, "sdpa"),
        (base[0], CPU, True, "sdpa"),
        (base[0], replace(CPU, packed_attention=False), False, "sdpa"),
        (tree, GPU, True, "sdpa"),
        (tree, CPU, True, "sdpa"),
    ):
        model = compose_verl_config(config, facts).actor_rollout_ref.model
        assert model.use_remove_padding is packs
        assert model.override_config.get("attn_implementation") == attention


@pytest.mark.parametrize(
    ("keys", "values", "facts", "message"),
    [
        (
            {},
            {},
            replace(CPU, packed_attention=False),
            r"pack is tree, but the model is not among .*llama",
        ),
        (
            {"trainer_common__ulysses_sequence_parallel_size": 2},
            {},
            GPU,
            r"pack is tree, and \S+ulysses_sequence_parallel_size is above 1: Ulysses divides .* write ",
        ),
        (
            {},
            {"+actor_rollout_ref.model.override_config.attn_implementation": "flash_attention_2"},
            GPU,
            r"attn_implementation is 'flash_attention_2', and astuner\.update\.pack is tree: .*; remove the line",
        ),
        (
            {},
            {"actor_rollout_ref": {"model": {"override_config": {"attn_implementation": "flash_attention_2"}}}},
            GPU,
            r"override_config\.attn_implementation is 'flash_attention_2', and astuner\.update\.pack is tree",
        ),
        (
            {},
            {"actor_rollout_ref.model.use_remove_padding": False},
            CPU,
            r"use_remove_padding is False, and \S+ is tree: padded rows share no prefixes; remove the line",
        ),
        (
            {},
            {"actor_rollout_ref.model.use_fused_kernels": True},
            CPU,
            r"use_fused_kernels is True, and \S+ is tree: the fused head ",
        ),
    ],
)
def test_shared_prefixes_that_cannot_be_computed_are_errors(
    keys: dict[str, object], values: dict[str, object], facts: VerlRunFacts, message: str
) -> None:
    config = run_config(update__pack="tree", **keys).model_copy(update={"verl": values})
    with pytest.raises(ConfigError, match=message):
        compose_verl_config(config, facts)


def test_attention_that_cannot_be_imported_is_an_error_with_the_command() -> None:
    key = "actor_rollout_ref.model.override_config.attn_implementation"
    nested = {"actor_rollout_ref": {"model": {"override_config": {"attn_implementation": "flash_attention_2"}}}}
    for section in ({f"+{key}": "flash_attention_2"}, nested):
        config = run_config().model_copy(update={"verl": section})
        for plan in (CPU, replace(GPU, flash_attention=False)):
            with pytest.raises(
                ConfigError, match=rf"verl\.{key} is 'flash_attention_2', .* or run: \S+ -m pip install flash-"
            ):
                compose_verl_config(config, plan)
        composed = compose_verl_config(config, GPU)
        assert composed.actor_rollout_ref.model.override_config.attn_implementation == "flash_attention_2"
    nested["actor_rollout_ref"]["model"]["override_config"]["attn_implementation"] = "flash_attention_3"
    with pytest.raises(ConfigError, match=rf"verl\.{key} is 'flash_attention_3'"):
        compose_verl_config(run_config().model_copy(update={"verl": nested}), GPU)


def test_a_nested_section_keeps_the_attention_of_the_machine() -> None:
    nested = {"actor_rollout_ref": {"model": {"override_config": {"rope_theta": 5}}}}
    composed = compose_verl_config(run_config().model_copy(update={"verl": nested}), CPU)
    assert composed.actor_rollout_ref.model.override_config == {"attn_implementation": "sdpa", "rope_theta": 5}


def test_a_joined_ray_cluster_gets_no_resource_settings() -> None:
    composed = compose_verl_config(run_config(trainer_common__ray_address="auto"), CPU)
    assert composed.ray_kwargs.ray_init.address == "auto"
    assert composed.ray_kwargs.ray_init.num_cpus is None
    assert "num_gpus" not in composed.ray_kwargs.ray_init
    assert composed.actor_rollout_ref.actor.strategy == "fsdp2"


def test_the_result_is_closed_for_new_keys(base: tuple[RunConfig, DictConfig]) -> None:
    assert OmegaConf.is_struct(base[1])


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write `run.yaml`: the required keys (8 lines), and a `verl:` section."""
    monkeypatch.chdir(tmp_path)

    def writer(section: str) -> Path:
        text = (
            "astuner:\n  backbone: verl\n  model:\n    path: m\n  rollout:\n    agentscope_workflow: a->A\n"
            f"  task_reader:\n    type: huggingface_dat_repo\nverl:\n{section}"
        )
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return writer


def composed_from(path: Path, *overrides: str, plan: VerlRunFacts = CPU) -> DictConfig:
    loaded = load_config(path, overrides)
    return compose_verl_config(loaded.config, replace(plan, origins=loaded.origins))


def test_a_section_is_passed_on_nested_dotted_or_from_the_command_line(write: Write) -> None:
    path = write(
        "  actor_rollout_ref.rollout.enable_prefix_caching: false\n"
        "  actor_rollout_ref:\n    nccl_timeout: 5\n    actor.fsdp_config.fsdp_size: 2\n"
        "    rollout:\n      engine_kwargs:\n        vllm: {swap_space: 4}\n"
        "  +actor_rollout_ref.model.override_config.rope_theta: 5\n"
        "  ray_kwargs:\n    ray_init:\n      +log_to_driver: false\n"
    )
    rollout = "verl.actor_rollout_ref.rollout"
    composed = composed_from(path, "verl.actor_rollout_ref.nccl_timeout=60", f"{rollout}.scheduling_policy=priority")
    assert composed.actor_rollout_ref.nccl_timeout == 60
    assert composed.actor_rollout_ref.rollout.scheduling_policy == "priority"
    assert composed.actor_rollout_ref.rollout.enable_prefix_caching is False
    assert composed.actor_rollout_ref.actor.fsdp_config.fsdp_size == 2
    assert composed.actor_rollout_ref.rollout.engine_kwargs.vllm == {"swap_space": 4}
    assert composed.actor_rollout_ref.model.override_config == {"attn_implementation": "sdpa", "rope_theta": 5}
    assert composed.ray_kwargs.ray_init.log_to_driver is False


def test_values_of_a_cpu_can_be_changed(write: Write) -> None:
    composed = composed_from(write("  actor_rollout_ref.actor:\n    use_torch_compile: true\n"))
    assert composed.actor_rollout_ref.actor.use_torch_compile is True


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "  actor_rollout_ref:\n    nccl_timout: 5\n",
            r"^run\.yaml:11: unknown key 'verl\.actor_rollout_ref\.nccl_timout'; did you mean "
            r"'verl\.actor_rollout_ref\.nccl_timeout'\?",
        ),
        (
            "  trainer: {test_freq: 0}\n",
            r"^run\.yaml:10: astuner\.trainer_common\.test_freq is 0; expected a number greater than 0$",
        ),
        (
            "  actor_rollout_ref:\n    actor:\n      policy_loss: {loss_mode: gspo}\n",
            r"^run\.yaml:12: verl\.actor_rollout_ref\.actor\.policy_loss\.loss_mode is 'gspo', and "
            r"astuner\.trainer_common\.algorithm\.adv_estimator sets it to 'vanilla'; change it there$",
        ),
        (
            "  +data.custom_cls.path: x\n",
            r"^run\.yaml:10: verl\.data\.custom_cls\.path cannot be set: astuner\.task_reader reads the tasks; ",
        ),
        (
            "  actor_rollout_ref:\n    rollout:\n      agent: {+agent_loop_manager_class: a.B}\n",
            r"^run\.yaml:12: verl\.actor_rollout_ref\.rollout\.agent\.agent_loop_manager_class cannot be set: "
            r"astuner's episode workers run the episodes; remove it$",
        ),
        (
            "  trainer.v1.trainer_mode: separate_async\n",
            r"^run\.yaml:10: verl\.\S+ is 'separate_async', but must be 'sync': astuner's trainer extends ",
        ),
        (
            "  trainer.device: npu\n",
            r"^run\.yaml:10: astuner\.trainer_common\.device is 'npu'; expected ",
        ),
        (
            "  trainer: {default_local_dir: elsewhere}\n",
            r"^run\.yaml:10: verl\.trainer\.default_local_dir is 'elsewhere', and astuner\.experiment_dir sets it to ",
        ),
        (
            "  actor_rollout_ref.rollout.logprobs_mode: raw_logprobs\n",
            r"is 'raw_logprobs', and \S+\.temperature, astuner\.rollout\.top_p and astuner\.rollout\.top_k "
            r"set it to 'processed_logprobs'; change it there$",
        ),
        ("  model_engine: megatron\n", r"^run\.yaml:10: verl\.model_engine cannot be set: .* FSDP"),
        (
            "  trainer: 3\n",
            r"^run\.yaml:10: verl\.trainer cannot be set: astuner's training loop .*; remove it$",
        ),
        (
            "  actor_rollout_ref.actor.strategy: megatron\n",
            r"^run\.yaml:10: verl\.actor_rollout_ref\.actor\.strategy is 'megatron'; expected 'fsdp' or 'fsdp2': ",
        ),
        (
            "  actor_rollout_ref:\n    actor:\n      fsdp_config: {fsdp_size: one}\n",
            r"^run\.yaml:12: verl\.actor_rollout_ref\.actor\.fsdp_config\.fsdp_size is 'one'; expected int$",
        ),
        (
            "  +actor_rollout_ref.actor.fsdp_config.fsdp_sise: 2\n",
            r"^run\.yaml:10: unknown key 'verl\.\S+\.fsdp_sise'; did you mean 'verl\.\S+\.fsdp_size'\?$",
        ),
        (
            "  +actor_rollout_ref.model.zzz: 2\n",
            r"unknown key 'verl\.\S+\.zzz'; the installed HFModelConfig has no such ",
        ),
        ("  ray_kwargs: 3\n", r"^run\.yaml:10: verl\.ray_kwargs is 3; expected a section with some of ray_init, "),
        ("  zzz: 3\n", r"^run\.yaml:10: unknown key 'verl\.zzz'; verl has model_engine, actor_rollout_ref, "),
        ("  total_epochs: 3\n", r"did you mean 'verl\.trainer\.total_epochs'\?"),
        (
            "  trainer: {x: 1}\n  data: {y: 2}\n",
            r"^2 problems in the configuration:\n  run\.yaml:10: .*\n  run\.yaml:11",
        ),
    ],
)
def test_an_invalid_section_is_an_error_with_its_place(write: Write, section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed_from(write(section))


def test_a_place_on_the_command_line(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"^command line: unknown key 'verl\.ray_kwargs\.ray_int'; did you mean"):
        composed_from(write("  {}\n"), "verl.ray_kwargs.ray_int=3")


@pytest.mark.parametrize(
    ("override", "plan", "message"),
    [
        (
            "astuner.trainer_common.ulysses_sequence_parallel_size=2",
            CPU,
            r"^command line: astuner\.trainer_common\.ulysses_sequence_parallel_size is not supported on a CPU: ",
        ),
        (
            "astuner.trainer_common.ulysses_sequence_parallel_size=2",
            replace(GPU, flash_attention=False),
            r"^command line: \S+ulysses_sequence_parallel_size is 2: .* flash-attention cannot be imported; write 1, ",
        ),
        (
            "astuner.trainer_common.n_gpus_per_node=4",
            replace(GPU, gpus=2),
            r"^command line: astuner\.trainer_common\.n_gpus_per_node is 4, and this machine has 2; write that or ",
        ),
        (
            # The former default is no exception.
            "astuner.trainer_common.n_gpus_per_node=8",
            replace(GPU, gpus=2),
            r"^command line: astuner\.trainer_common\.n_gpus_per_node is 8, and this machine has 2; write that or ",
        ),
        (
            "astuner.trainer_common.nnodes=2",
            GPU,
            r"^command line: astuner\.trainer_common\.nnodes is 2, and the Ray cluster started for a run is on one ",
        ),
        (
            "astuner.rollout.top_p=0.9",
            replace(CPU, rollout_engine="vllm"),
            r"^command line: astuner\.rollout\.top_p requires a temperature of 1 on vLLM: .*; write rollout",
        ),
        (
            "astuner.rollout.tensor_model_parallel_size=3",
            GPU,
            r"^command line: astuner\.rollout\.tensor_model_parallel_size is 3, which does not divide the 8 GPUs of ",
        ),
        (
            "astuner.rollout.tensor_model_parallel_size=8",
            replace(GPU, heads=28),
            r"size is 8, which does not divide the model's 28 attention heads; write one of 1, 2, 4, 7, 14, 28$",
        ),
        (
            "astuner.trainer_common.ulysses_sequence_parallel_size=8",
            replace(GPU, heads=28),
            r"ulysses\S+ is 8, which does not divide the model's 28 attention heads",
        ),
    ],
)
def test_values_that_do_not_fit_the_machine_are_errors(
    write: Write, override: str, plan: VerlRunFacts, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        composed_from(write("  {}\n"), override, plan=plan)
