"""Trinity's configuration as composed: key by key, checked by Trinity's own classes, and with a `trinity:` section."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from omegaconf import OmegaConf

from astuner.backbone.trinity.rules import TrinityRunFacts
from astuner.backbone.trinity.trainer_config import (
    check_without_ray,
    compose_trinity_config,
    configured_tinker_service,
    packaged_config,
    trinity_config,
)
from astuner.config.keys import KeyPath, dotted, parts, schema
from astuner.config.loading import load_config, unsupported_values, with_values
from astuner.config.root import RunConfig
from astuner.config.trainer_mapping import trainer_mapping
from astuner.errors import BackboneError, ConfigError
from tests.backbone.trinity.plans import FOREIGN, GPU, TINKER, run_config

pytestmark = pytest.mark.trinity

MAPPING = trainer_mapping("trinity")
SETTING = [path for path, keys in MAPPING.trainer_keys.items() if any(key.kind != "from_run" for key in keys)]
BASE: dict[str, object] = {
    "asynchrony__max_staleness": 3,
    "trainer_common__max_tokens_per_micro_batch": 20000,
    "trainer_common__optim__lr_warmup_steps": 3,
    # Half of the GPUs sample, so that with another number of machines each still belongs to one side.
    "rollout__n_vllm_engine": 4,
    "rollout__tensor_model_parallel_size": 2,
    "trainer_common__nnodes": 2,
    "trainer_common__correction__mode": "icepop",  # auto has no bounds
    "trainer_common__ray_address": "auto",  # so that the GPUs of this machine are no bound
}
OTHERS: dict[str, tuple[object, ...]] = {
    "astuner.asynchrony.over_rollout": (0.25,),
    "astuner.asynchrony.sync_style": ("trainer_driven", "fully_async"),
    "astuner.model.dtype": ("float32",),
    "astuner.rollout.gpu_memory_utilization": (0.8,),
    "astuner.trainer_common.algorithm.clip_ratio_low": (0.17,),
    "astuner.trainer_common.algorithm.entropy_coef": (0.01,),
    "astuner.trainer_common.algorithm.clip_ratio_high": (0.33,),
    "astuner.trainer_common.algorithm.clip_ratio_dual": (2.5,),
    "astuner.trainer_common.algorithm.loss_agg_mode": ("token-mean",),
    "astuner.trainer_common.algorithm.norm_adv_by_std": (False,),
    "astuner.trainer_common.correction.mode": ("auto", "geo_rs"),
    "astuner.trainer_common.correction.max_weight": (9.0,),
    "astuner.trainer_common.correction.min_weight": (0.25,),
    "astuner.trainer_common.correction.max_rejection": (1.5,),
    "astuner.trainer_common.correction.min_rejection": (0.25,),
    "astuner.trainer_common.kl_loss_coef": (0.5, 0.0),
    "astuner.trainer_common.max_tokens_per_micro_batch": (24000,),
    "astuner.rollout.n_vllm_engine": (5,),
    "astuner.rollout.tensor_model_parallel_size": (3,),
    "astuner.trainer_common.n_gpus_per_node": (6,),
    "astuner.trainer_common.nnodes": (3,),
    "astuner.trainer_common.optim.betas": ((0.8, 0.99),),
}


def flat(composed: dict[str, Any]) -> dict[str, object]:
    """Every value by its dotted key."""
    values: dict[str, object] = {}

    def walk(node: Any, prefix: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, f"{prefix}{key}.")
        else:
            values[prefix[:-1]] = node

    walk(composed, "")
    return values


def changed_keys(before: dict[str, Any], after: dict[str, Any], mapped: set[str]) -> set[str]:
    """The keys that differ; for what is set as a mapping, the key of the mapping."""
    old, new = flat(before), flat(after)
    differ = {key for key in old.keys() | new.keys() if old.get(key, "absent") != new.get(key, "absent")}
    return {next((parent for parent in mapped if key.startswith(f"{parent}.")), key) for key in differ}


def other_values(path: KeyPath) -> tuple[object, ...]:
    """Values of a key that are supported and not its default."""
    if dotted(path) in OTHERS:
        return OTHERS[dotted(path)]
    key = schema().keys[path]
    if isinstance(key.default, bool):
        return (not key.default,)
    if isinstance(key.default, str):
        others = (choice for choice in get_args(key.annotation) if choice != key.default)
        return tuple(
            candidate
            for candidate in others
            if not list(unsupported_values(with_values(run_config(), {dotted(path): candidate})))
        )
    if isinstance(key.default, int):
        return (key.default + 1,) if key.default >= 0 else (5,)
    assert isinstance(key.default, float), path
    return (key.default / 2 + 0.125,)


def loaded_by_trinity(composed: dict[str, Any]) -> Any:
    """Trinity's own object, as its `load_config` makes it of a file."""
    return OmegaConf.to_object(OmegaConf.merge(packaged_config(), OmegaConf.create(composed)))


def at(node: Any, key: str) -> Any:
    """The value at a dotted key of Trinity's objects and plain mappings."""
    for part in parts(key):
        node = node[part] if isinstance(node, dict) else getattr(node, part)
    return node


@pytest.fixture(scope="module")
def base() -> tuple[RunConfig, dict[str, Any]]:
    config = run_config(**BASE)
    return config, compose_trinity_config(config, GPU)


@pytest.mark.parametrize("path", SETTING, ids=dotted)
def test_a_key_changes_exactly_the_keys_that_it_declares(path: KeyPath, base: tuple[RunConfig, dict[str, Any]]) -> None:
    named = {key.name for key in MAPPING.trainer_keys[path] if key.kind != "from_run"}
    # On GPUs there are neither float32 nor adapters, and the share of the longest sample counts where it is the larger.
    plan = TINKER if path[-1] in ("dtype", "rank") else GPU
    config = (
        base[0]
        if path[-1] != "ulysses_sequence_parallel_size"
        else with_values(base[0], {"astuner.trainer_common.max_tokens_per_micro_batch": 9000})
    )
    composed = compose_trinity_config(config, plan)
    all_changes: set[str] = set()
    for value in other_values(path):
        changed = compose_trinity_config(with_values(config, {dotted(path): value}), plan)
        loaded_by_trinity(changed)
        changes = changed_keys(composed, changed, named)
        assert changes <= named, value
        all_changes |= changes
    assert all_changes == named or path[-1] == "dtype"
    if path[-1] == "dtype":
        assert compose_trinity_config(config, GPU)["explorer"]["rollout_model"]["dtype"] == "bfloat16"


def test_other_keys_change_nothing(base: tuple[RunConfig, dict[str, Any]]) -> None:
    config, composed = base
    values = {
        dotted(path): other_values(path)[0]
        for path, key in schema().keys.items()
        if path not in SETTING and isinstance(key.default, int | float) and not key.unsupported
    }
    assert len(values) > 10
    assert compose_trinity_config(with_values(config, values), GPU) == composed


def test_trainer_keys_are_named_as_in_trinity() -> None:
    default = loaded_by_trinity({})
    names = {key.name for keys in MAPPING.trainer_keys.values() for key in keys}
    names |= {*MAPPING.facts, *MAPPING.fixed, *MAPPING.reserved}
    names |= {name for group in MAPPING.machine.values() for name in (*group.values, *group.rules)}
    free = ("trainer.trainer_config.", "explorer.rollout_model.extra_engine_args.")
    for key in names:
        if not key.startswith(free):
            at(default, key)


@pytest.mark.parametrize("plan", [GPU, TINKER], ids=["gpu", "tinker"])
def test_trinitys_own_classes_have_every_value(plan: TrinityRunFacts) -> None:
    composed = compose_trinity_config(run_config(), plan)
    loaded = loaded_by_trinity(composed)
    for key, value in flat(composed).items():
        actual = at(loaded, key) if not isinstance(value, dict | list) else value
        assert getattr(actual, "value", actual) == value, key


def test_values_with_a_tinker_service_and_on_gpus() -> None:
    tinker, gpus = compose_trinity_config(run_config(), TINKER), compose_trinity_config(run_config(), GPU)
    for composed, machine in ((tinker, "tinker"), (gpus, "gpus")):
        for key, value in {**MAPPING.machine["always"].values, **MAPPING.machine[machine].values}.items():
            assert at(composed, key) == value
    assert tinker["model"]["tinker"]["base_url"] == "http://127.0.0.1:8765"
    assert (tinker["explorer"]["rollout_model"]["engine_type"], tinker["trainer"]["trainer_type"]) == (
        "tinker",
        "tinker",
    )
    assert (gpus["explorer"]["rollout_model"]["engine_type"], gpus["trainer"]["trainer_type"]) == ("vllm", "verl")
    assert gpus["cluster"] == {"node_num": 1, "gpu_per_node": 8}
    assert "base_url" not in gpus["model"]["tinker"]


def test_the_last_optimizer_step_of_a_cosine_schedule_has_the_smallest_rate() -> None:
    """The trainer on GPUs is verl's, and that of a Tinker service is Trinity's."""
    import torch
    from torch.optim import SGD
    from trinity.trainer.tinker.tinker_trainer import TinkerTrainerWrapper
    from trinity.trainer.verl.config import build_verl_config
    from verl.utils.torch_functional import get_cosine_schedule_with_warmup

    settings = {"lr": 0.5, "lr_scheduler": "cosine", "min_lr_ratio": 0.1, "lr_warmup_steps": 2}
    values = {f"astuner.trainer_common.optim.{name}": value for name, value in settings.items()}
    loaded = loaded_by_trinity(compose_trinity_config(with_values(run_config(), values), GPU))
    optim = build_verl_config(loaded).actor.optim
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = SGD([parameter], lr=optim.lr)
    schedule = get_cosine_schedule_with_warmup(
        optimizer,
        optim.lr_warmup_steps,
        optim.total_training_steps,
        optim.min_lr_ratio,
        optim.num_cycles,
        zero_indexed_step=optim.zero_indexed_step,
    )
    rates = []
    for _ in range(loaded.trainer.total_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert (rates[-1], min(rates[2:]), max(rates)) == pytest.approx((0.05, 0.05, 0.5))

    tinker = TinkerTrainerWrapper.__new__(TinkerTrainerWrapper)
    tinker.algorithm_config = loaded.algorithm
    tinker.lr_scheduler_type, tinker.min_lr_ratio = "cosine", 0.1
    tinker.total_steps, tinker.num_warmup_steps = loaded.trainer.total_steps, 2
    # Trinity counts an optimizer step before it computes its rate.
    tinker._train_step_num = loaded.trainer.total_steps
    assert tinker.current_learning_rate == pytest.approx(0.05)


def test_gpus_without_flash_attention_pad_rows_and_use_the_attention_of_pytorch(write: Write) -> None:
    plan = replace(GPU, flash_attention=False)
    trainer = compose_trinity_config(run_config(), plan)["trainer"]
    assert trainer["use_remove_padding"] is False
    assert trainer["trainer_config"]["model"]["override_config"] == {"attn_implementation": "sdpa"}
    with_it = compose_trinity_config(run_config(), GPU)["trainer"]
    assert "use_remove_padding" not in with_it
    assert "override_config" not in with_it["trainer_config"]["model"]
    # Each way to write another key of the same mapping keeps the attention.
    for section in (
        "  trainer.trainer_config: {model: {override_config: {rope_theta: 5}}}\n",
        "  trainer.trainer_config.actor_rollout_ref.model.override_config.rope_theta: 5\n",
        "  trainer:\n    trainer_config: {actor_rollout_ref: {model: {override_config: {rope_theta: 5}}}}\n",
    ):
        trainer = composed_from(write(section), plan=plan)["trainer"]
        assert trainer["trainer_config"]["model"]["override_config"] == {"attn_implementation": "sdpa", "rope_theta": 5}
    packed = composed_from(write("  trainer.use_remove_padding: true\n"), plan=plan)
    assert packed["trainer"]["use_remove_padding"] is True  # PyTorch's attention takes packed rows, too


@pytest.mark.parametrize("attention", ["flash_attention_2", "flash_attention_3", "flash_atention_2", "3"])
def test_attention_that_cannot_be_imported_is_an_error_with_the_command(write: Write, attention: str) -> None:
    key = "trainer.trainer_config.model.override_config.attn_implementation"
    place = rf"^run\.yaml:10: trinity\.{key.replace('.', chr(92) + '.')} is '?{attention}'?, "
    fix = {
        "flash_attention_2": r"and flash_attn cannot be imported; .* run: \S+ -m pip install flash-attn --no-build-",
        "flash_attention_3": r"and flash_attn_interface cannot be imported; write 'sdpa', or run: ",
        "flash_atention_2": r"which transformers does not have; did you mean 'flash_attention_2'\?$",
        "3": r"which transformers does not have; expected one of eager, flash_attention_2, ",
    }
    path = write(f"  {key}: {attention}\n")
    with pytest.raises(ConfigError, match=place + fix[attention]):
        composed_from(path, plan=replace(GPU, flash_attention=False))
    composed_from(path.parent / "run.yaml", plan=TINKER)  # with a Tinker service, verl's workers do not run


@pytest.mark.parametrize(
    "section",
    [
        "  trainer.trainer_config: {model: {override_config: {attn_implementation: flash_attention_3}}}\n",
        "  trainer:\n    trainer_config: {actor_rollout_ref: {model.override_config: {attn_implementation: "
        "flash_attention_3}}}\n",
    ],
)
def test_attention_in_a_nested_section_is_checked(write: Write, section: str) -> None:
    text = r"override_config\.attn_implementation is 'flash_attention_3', and flash_attn_interface cannot be imported"
    for plan in (GPU, replace(GPU, flash_attention=False)):
        with pytest.raises(ConfigError, match=text):
            composed_from(write(section), plan=plan)


def test_facts_and_fixed_keys_have_their_values() -> None:
    composed = compose_trinity_config(run_config(), TINKER)
    assert composed["checkpoint_root_dir"] == "/records/run/trinity"
    assert composed["ray_namespace"] == "run-1"
    assert composed["explorer"]["runner_per_model"] == 3
    assert composed["buffer"]["total_steps"] == composed["trainer"]["total_steps"] == 7
    for key, fixed in MAPPING.fixed.items():
        actual = at(composed, key)
        assert actual == fixed.value or {**actual, **fixed.value} == actual


Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write `run.yaml`: the required keys (9 lines), and a `trinity:` section."""
    monkeypatch.chdir(tmp_path)

    def writer(section: str) -> Path:
        text = (
            "astuner:\n  backbone: trinity\n  model:\n    path: m\n"
            "  rollout:\n    {agentscope_workflow: a->A, temperature: 1.0}\n"
            f"  task_reader:\n    type: huggingface_dat_repo\ntrinity:\n{section}"
        )
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return writer


def composed_from(path: Path, *overrides: str, plan: TrinityRunFacts = TINKER) -> dict[str, Any]:
    loaded = load_config(path, overrides)
    return compose_trinity_config(loaded.config, replace(plan, origins=loaded.origins))


def test_a_section_is_passed_on_nested_dotted_or_from_the_command_line(write: Write) -> None:
    path = write(
        "  explorer.runner_prepare_concurrency: 2\n"
        "  explorer:\n    rollout_model:\n      enforce_eager: true\n      extra_engine_args: {block_size: 32}\n"
        "  model:\n    tinker: {train_unembed: true}\n"
        "  trainer.trainer_config.actor.fsdp_config.reshard_after_forward: false\n"
    )
    composed = composed_from(path, "trinity.explorer.env_vars.A=b", "trinity.log.level=DEBUG")
    assert composed["explorer"]["runner_prepare_concurrency"] == 2
    assert composed["explorer"]["rollout_model"]["enforce_eager"] is True
    assert composed["explorer"]["rollout_model"]["extra_engine_args"] == {"max_num_seqs": 64, "block_size": 32}
    assert composed["explorer"]["env_vars"] == {"A": "b"}
    assert composed["model"]["tinker"]["train_unembed"] is True
    trainer = composed["trainer"]["trainer_config"]
    assert trainer == {
        "model": {"enable_gradient_checkpointing": False},
        "actor": {"fsdp_config": {"reshard_after_forward": False}},
    }
    assert composed["log"] == {"level": "DEBUG"}
    loaded_by_trinity(composed)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (
            "  explorer:\n    runner_prepare_concurency: 2\n",
            r"^run\.yaml:11: unknown key 'trinity\.explorer\.runner_prepare_concurency'; did you mean "
            r"'trinity\.explorer\.runner_prepare_concurrency'\?$",
        ),
        (
            "  synchronizer: {sync_style: fixed}\n",
            r"^run\.yaml:10: astuner\.asynchrony\.sync_style is 'fixed', which --backbone=trinity does not support: ",
        ),
        (
            "  trainer:\n    trainer_type: verl\n",
            r"^run\.yaml:11: trinity\.trainer\.trainer_type is 'verl', and astuner\.trainer_common\.device sets it to "
            r"'tinker'; change it there$",
        ),
        (
            "  explorer.max_inflight_batches: 2\n",
            r"is 2, and astuner\.asynchrony\.sync_interval and astuner\.asynchrony\.max_staleness set it to 1; ",
        ),
        (
            "  model.max_response_tokens: 0\n",
            r"^run\.yaml:10: astuner\.rollout\.max_response_length_in_one_turn is 0; expected a number greater than 0$",
        ),
        ("  mode: bench\n", r"^run\.yaml:10: trinity\.mode is set by astuner for each run; remove it$"),
        ("  algorithm.advantage_fn: grpo\n", r"^run\.yaml:10: .* but must be 'astuner\.backbone\.\S+': every episode"),
        (
            "  buffer:\n    explorer_input:\n      taskset: {split: x}\n",
            r"^run\.yaml:12: trinity\.buffer\.explorer_input\.taskset\S* .*astuner\.task_reader reads the tasks; ",
        ),
        (
            "  explorer.rollout_model.extra_engine_args: {max_num_seqs: none}\n",
            r"^run\.yaml:10: astuner\.rollout\.max_num_seqs is 'none'; expected a whole number$",
        ),
        ("  data_processor: {x: 1}\n", r"^run\.yaml:10: trinity\.data_processor\S* cannot be set: "),
        (
            "  explorer:\n    runner_prepare_concurrency: many\n",
            r"^run\.yaml:11: trinity\.explorer\.runner_prepare_concurrency cannot be 'many': .*; write another value$",
        ),
        (
            "  trainer.trainer_strategy: megatron\n",
            r"^run\.yaml:10: trinity\.trainer\.trainer_strategy is 'megatron'; expected 'fsdp' or 'fsdp2': ",
        ),
        (
            "  trainer:\n    trainer_config: {actor: {fsdp_config: {fsdp_size: one}}}\n",
            r"^run\.yaml:1[01]: trinity\.\S+\.actor\.fsdp_config\.fsdp_size is .one.; expected int$",
        ),
        (
            "  trainer.trainer_config.actor.fsdp_config.fsdp_sise: 2\n",
            r"^run\.yaml:10: unknown key 'trinity\.\S+\.fsdp_sise'; did you mean 'trinity\.\S+\.fsdp_size'\?$",
        ),
        (
            "  trainer.trainer_config.actors.lr: 2\n",
            r"unknown section 'trinity\.trainer\.\S+'; did you mean 'actor'\?$",
        ),
        ("  trainer.trainer_config: fsdp\n", r"is 'fsdp'; expected a section with some of model, actor, ref, rollout$"),
        (
            "  trainer.trainer_config.actor.megatron.x: 2\n",
            r"unknown key 'trinity\.\S+\.actor\.megatron'; the installed ",
        ),
        (
            "  trainer.trainer_config.ref.fsdp_config.strategy: megatron\n",
            r"^run\.yaml:10: trinity\.\S+\.ref\.fsdp_config\.strategy has no effect: Trinity sets it ",
        ),
        (
            "  trainer.trainer_config: {actor: {fsdp_config: {strategy: megatron}}}\n",
            r"^run\.yaml:10: trinity\.\S+\.actor\.fsdp_config\.strategy has no effect: Trinity sets it ",
        ),
        (
            "  trainer.trainer_config.actor_rollout_ref.actor.grad_clip: 2\n",
            r"^run\.yaml:10: trinity\.trainer\.trainer_config\.actor\.grad_clip has no effect: Trinity sets it ",
        ),
        (
            "  explorer.rollout_model.extra_engine_args: {block_sise: 32}\n",
            r"unknown key 'trinity\.\S+\.extra_engine_args\.block_sise'; did you mean '\S+\.block_size'\?$",
        ),
        (
            "  explorer.rollout_model.extra_engine_args: {seed: first}\n",
            r"^run\.yaml:10: trinity\.explorer\.rollout_model\.extra_engine_args\.seed is 'first'; expected int$",
        ),
        ("  explorer: 3\n", r"^run\.yaml:10: trinity\.explorer is 3; expected a section with some of name, "),
        ("  +zzz: 3\n", r"^run\.yaml:10: unknown key 'trinity\.zzz'; trinity has mode, project, "),
    ],
)
def test_an_invalid_section_is_an_error_with_its_place(write: Write, section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composed_from(write(section))


def test_a_place_on_the_command_line(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"^command line: unknown key 'trinity\.log\.levle'; did you mean"):
        composed_from(write("  {}\n"), "trinity.log.levle=x")


@pytest.mark.parametrize(
    "section",
    ["  model.tinker.base_url: https://t.example\n", "  model:\n    tinker: {base_url: 'https://t.example'}\n"],
)
def test_the_configured_tinker_service(write: Write, section: str) -> None:
    assert configured_tinker_service(load_config(write(section)).config) == "https://t.example"
    assert configured_tinker_service(load_config(write("  log: {level: INFO}\n")).config) is None


@pytest.mark.parametrize(
    ("overrides", "plan", "message"),
    [
        (
            ["asynchrony.sync_style=fully_async"],
            TINKER,
            r"^command line: astuner\.asynchrony\.sync_style is 'fully_async', and the run has validation tasks: .*; "
            r"write explorer_driven or trainer_driven, or configure no validation tasks$",
        ),
        (
            ["asynchrony.sync_style=fully_async", "asynchrony.max_staleness=0"],
            replace(TINKER, validates=False),
            r"^command line: astuner\.asynchrony\.sync_style is 'fully_async', and no step may run ahead: .*; write a ",
        ),
        (
            [
                "asynchrony.sync_style=trainer_driven",
                "asynchrony.sync_interval=2",
                "asynchrony.max_staleness=2",
                "trainer_common.test_freq=5",
            ],
            TINKER,
            r"^command line: .*trainer_common\.test_freq is 5, not a multiple of sync_interval \(2\): .*; write ",
        ),
        (
            ["model.lora.rank=4", "rollout.temperature=0.9"],
            FOREIGN,
            r"^command line: astuner\.rollout\.temperature is 0\.9, and the Tinker service at http://\S+ trains at "
            r"temperature 1, .*; write 1\.0, or remove trinity\.model\.tinker\.base_url, so that the run starts its ",
        ),
        (
            ["model.lora.rank=4", "model.lora.alpha=8"],
            FOREIGN,
            r"^command line: astuner\.model\.lora\.alpha is 8, and the Tinker service at \S+ has 32; write 32, or ",
        ),
        (
            ["model.lora.rank=4", "model.lora.target_modules=q_proj"],
            FOREIGN,
            r"^command line: astuner\.model\.lora\.target_modules is 'q_proj', and the Tinker service at \S+ takes ",
        ),
        ([], FOREIGN, r"astuner\.model\.lora\.rank is 0, and the Tinker service at \S+ trains adapters only; write 32"),
        (
            ["trainer_common.algorithm.entropy_coef=0.01"],
            TINKER,
            r"^command line: astuner\.trainer_common\.algorithm\.entropy_coef is 0\.01: a Tinker service returns the ",
        ),
        (["model.dtype=float32"], GPU, r"^command line: astuner\.model\.dtype is 'float32', and Trinity's trainer "),
        (
            ["trainer_common.nnodes=2", "rollout.n_vllm_engine=8"],
            GPU,
            r"^command line: .*nnodes is 2, and the Ray cluster started for a run is on one ",
        ),
        (["trainer_common.n_gpus_per_node=4"], replace(GPU, gpus=2), r"n_gpus_per_node is 4, and this machine has 2; "),
        ([], replace(GPU, gpus=1), r"too few GPUs \(1\): engines and trainer need at least one GPU each; .* write "),
        (
            ["rollout.n_vllm_engine=4", "rollout.tensor_model_parallel_size=2"],
            GPU,
            r"^command line: astuner\.rollout\.n_vllm_engine \(4\) × tensor_model_parallel_size \(2\) = 8 of 8 GPUs, ",
        ),
        (["rollout.n_vllm_engine=4", "rollout.max_env_worker=3"], GPU, r"worker is 3, less than .*n_vllm_engine \(4\)"),
        (
            ["trainer_common.nnodes=3", "trainer_common.ray_address=auto"],
            GPU,
            r"n_vllm_engine × tensor_model_parallel_size = 2 GPUs leaves 22 for the trainer, which needs whole",
        ),
        (
            ["trainer_common.ulysses_sequence_parallel_size=4"],
            GPU,
            r"ulysses\S+ is 4, which does not divide the 6 GPUs",
        ),
        (
            ["rollout.tensor_model_parallel_size=3"],
            replace(GPU, heads=28),
            r"size is 3, which does not divide the model's 28 attention heads; write one of 1, 2, 4, 7, 14, 28$",
        ),
        (
            ["trainer_common.ulysses_sequence_parallel_size=2"],
            replace(GPU, flash_attention=False),
            r"^command line: \S+ulysses\S+ is 2: Ulysses needs packed rows, .*; write 1, or run: .* flash-attn ",
        ),
    ],
)
def test_values_that_do_not_fit_the_machine_or_service_are_errors(
    write: Write, overrides: list[str], plan: TrinityRunFacts, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        composed_from(write("  {}\n"), *(f"astuner.{override}" for override in overrides), plan=plan)


@pytest.mark.parametrize("plan", [TINKER, replace(TINKER, device="cuda"), replace(FOREIGN, mode="bench")])
def test_astuners_own_server_takes_temperature_alpha_and_modules(write: Write, plan: TrinityRunFacts) -> None:
    values = ["rollout.temperature=0.7", "model.lora.rank=8", "model.lora.alpha=64", "model.lora.target_modules=q_proj"]
    composed_from(write("  {}\n"), *(f"astuner.{value}" for value in values), plan=plan)


def test_two_selections_of_modules_are_an_error(write: Write) -> None:
    path = write("  model:\n    tinker: {train_attn: false}\n")
    with pytest.raises(ConfigError, match=r"target_modules is 'q_proj', and trinity\.model\.tinker\.train_attn would "):
        composed_from(path, "astuner.model.lora.rank=8", "astuner.model.lora.target_modules=q_proj")
    composed_from(path, "astuner.model.lora.rank=8")


def test_a_key_that_agrees_with_what_astuner_sets_is_taken(write: Write) -> None:
    lines = ["mode: both", "trainer.trainer_type: tinker", "algorithm.bypass_old_logprobs: true"]
    lines += ["explorer.max_inflight_batches: 1", "trainer.save_interval: 40"]
    composed = composed_from(write("".join(f"  {line}\n" for line in lines)), "astuner.trainer_common.mini_batch_num=2")
    assert (composed["mode"], composed["trainer"]["trainer_type"]) == ("both", "tinker")
    assert composed["trainer"]["save_interval"] == 40


@pytest.mark.parametrize("plan", [TINKER, GPU], ids=["tinker", "gpus"])
def test_checks_of_trinity_run_before_ray_starts_and_leave_no_folder(plan: TrinityRunFacts, tmp_path: Path) -> None:
    import ray

    composed = trinity_config(run_config(), replace(plan, checkpoint_root_dir=tmp_path / "trinity"))
    check_without_ray(composed, has_model=False)
    composed.algorithm.advantage_fn = "paper"
    with pytest.raises(BackboneError, match=r"^Trinity rejected its configuration: Invalid \w.*: paper$"):
        check_without_ray(composed, has_model=False)
    assert not ray.is_initialized()
    assert list(tmp_path.iterdir()) == []
