"""Keys of the `verl:` and `trinity:` sections that name the same thing as a key of astuner."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from astuner.config.canonical import COMMAND_LINE
from astuner.config.composition import compose_files
from astuner.config.keys import dotted, get_at, schema, value_at, with_value
from astuner.config.loading import load_config
from astuner.config.trainer_mapping import SameThing, TrainerName, trainer_mapping, with_trainer_aliases
from astuner.config.validation import Draft
from astuner.errors import ConfigError

Write = Callable[..., Path]
TRAINERS: tuple[TrainerName, ...] = ("trinity", "verl")
CASES = [(trainer, name, same) for trainer in TRAINERS for name, same in trainer_mapping(trainer).aliases.items()]
# Two values each that all backbones support; for other types, see `own_values`.
VALUES: dict[str, tuple[Any, Any]] = {
    "astuner.asynchrony.max_staleness": (2, 3),
    "astuner.asynchrony.over_rollout": (0.25, 0.5),
    "astuner.asynchrony.sync_interval": (2, 1),
    "astuner.asynchrony.sync_style": ("trainer_driven", "explorer_driven"),
    "astuner.model.dtype": ("bfloat16", "float32"),
    "astuner.rollout.max_model_len": (9000, 8000),
    "astuner.rollout.name": ("vllm", "auto"),
    "astuner.rollout.top_k": (20, 40),
    "astuner.trainer_common.algorithm.adv_estimator": ("reinforce++", "grpo"),
    "astuner.trainer_common.algorithm.clip_ratio_dual": (3.0, 4.0),
    "astuner.trainer_common.algorithm.kl_penalty": ("k2", "k1"),
    "astuner.trainer_common.algorithm.loss_agg_mode": ("token-mean", "seq-mean-token-mean"),
    "astuner.trainer_common.algorithm.norm_adv_by_std": (False, True),
    "astuner.trainer_common.algorithm.use_kl_in_reward": (True, False),
    "astuner.trainer_common.device": ("cpu", "auto"),
    "astuner.trainer_common.kl_loss_type": ("k2", "k1"),
    "astuner.trainer_common.logger": (["wandb"], ["tensorboard"]),
    "astuner.trainer_common.optim.betas": ([0.8, 0.9], [0.7, 0.8]),
    "astuner.trainer_common.optim.lr_scheduler": ("cosine", "constant"),
    "astuner.trainer_common.ray_address": ("auto", "10.0.0.1:6379"),
}
NEEDS = {
    "astuner.asynchrony.sync_interval": ["astuner.asynchrony.max_staleness=3"],
    "astuner.trainer_common.algorithm.kl_penalty": ["astuner.trainer_common.algorithm.use_kl_in_reward=true"],
    "astuner.trainer_common.mini_batch_num": ["astuner.data.train_batch_size=12"],
}
FACTOR = 3


def own_values(key: str) -> tuple[Any, Any]:
    if key in VALUES:
        return VALUES[key]
    default = schema().keys[tuple(key.split("."))].default
    if isinstance(default, bool):
        return not default, default
    if isinstance(default, int) or key.endswith(("n_gpus_per_node", "total_training_steps")):
        return 6, 4
    if isinstance(default, float) or default is None:
        return 0.25, 0.5
    return "one", "two"


def written(same: SameThing, own: Any) -> Any:
    """The trainer's value that means the same as a value of astuner's key."""
    if same.quotient:
        return 12 // own
    if same.factor:
        return own * FACTOR
    return next((theirs for theirs, ours in same.values.items() if ours == own), own)


def overrides_for(trainer: str, key: str, same: SameThing) -> list[str]:
    factor = [f"{same.factor}={FACTOR}"] if same.factor else []
    return [f"astuner.backbone={trainer}", *NEEDS.get(key, []), *factor]


@pytest.fixture(scope="module")
def composed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Draft]:
    """Return a function that composes a minimal file with overrides, once for each of them."""
    path = tmp_path_factory.mktemp("aliases") / "run.yaml"
    path.write_text("astuner:\n  rollout:\n    agentscope_workflow: a->B\n")
    return cache(lambda *overrides: compose_files(path, overrides))


@pytest.mark.parametrize(("trainer", "name", "same"), CASES, ids=[f"{trainer}.{name}" for trainer, name, _ in CASES])
def test_every_key_of_the_same_meaning_is_taken(
    composed: Callable[..., Draft], trainer: str, name: str, same: SameThing
) -> None:
    key = dotted(same.keys[0])
    if key == "astuner.rollout.gamma":
        pytest.skip("has only one supported value")
    first, second = own_values(key)
    base = composed(*overrides_for(trainer, key, same))
    theirs = written(same, first)

    def taken(**own: Any) -> tuple[Mapping[str, Any], tuple[str, ...], list[str]]:
        tree = with_value(base.tree, (trainer, *name.split(".")), theirs)
        origins = {**base.origins, (trainer, *name.split(".")): "run.yaml:1"}
        for value in own.values():
            tree, origins = with_value(tree, same.keys[0], value), {**origins, same.keys[0]: COMMAND_LINE}
        draft = with_trainer_aliases(Draft(tree, origins), trainer_mapping(trainer))
        return draft.tree, draft.notices, [problem.text for problem in draft.problems]

    tree, notices, problems = taken()
    assert not problems
    assert get_at(tree, same.keys[0]) == first
    assert not tree[trainer]
    assert any(f"{trainer}.{name} is read as {key}; write {key}" in notice for notice in notices)
    assert not taken(own=first)[2]
    clash = f"{trainer}.{name} is {theirs!r}, and {key}, which is the same thing, is {second!r} (command"
    assert any(clash in problem for problem in taken(own=second)[2])


def whole_files() -> Iterator[tuple[str, dict[str, SameThing]]]:
    """Yield files of a trainer's section whose keys mean different things, until each key is in one."""
    for trainer in TRAINERS:
        files: list[dict[str, SameThing]] = []
        for name, same in trainer_mapping(trainer).aliases.items():
            if same.keys[0] != ("astuner", "rollout", "gamma"):
                one = [
                    file for file in files if not {key for other in file.values() for key in other.keys} & {*same.keys}
                ]
                if not one:
                    files.append({})
                (one or files)[-1][name] = same
        yield from ((trainer, file) for file in files)


@pytest.mark.parametrize(("trainer", "names"), list(whole_files()))
def test_all_of_a_file_are_taken(write: Write, trainer: str, names: dict[str, SameThing]) -> None:
    lines, needed, expected = ["astuner:\n  rollout:\n    agentscope_workflow: a->B", f"{trainer}:"], {}, {}
    if not any(same.keys[0] == ("astuner", "model", "path") for same in names.values()):
        lines[0] += "\n  model:\n    path: some/model"
    for name, same in names.items():
        key = dotted(same.keys[0])
        expected[key], _ = own_values(key)
        lines.append(f"  {name}: {json.dumps(written(same, expected[key]))}")
        needed |= dict.fromkeys(overrides_for(trainer, key, same))
    overrides = [line for line in needed if line.partition("=")[0] not in expected]
    loaded = load_config(write("\n".join(lines) + "\n"), overrides)
    for key, value in expected.items():
        found = value_at(loaded.config, tuple(key.split(".")))
        assert (list(found) if isinstance(found, tuple) else found) == value, key
    assert getattr(loaded.config, trainer) == {}
    for name, same in names.items():
        read_as = f"{trainer}.{name} is read as {dotted(same.keys[0])}; write"
        assert any(read_as in notice for notice in loaded.notices), read_as


@pytest.mark.parametrize(
    ("backbone", "alias", "key"),
    [
        ("verl", "trainer.total_training_steps", "trainer_common.total_training_steps"),
        ("trinity", "trainer.total_steps", "trainer_common.total_training_steps"),
    ],
)
def test_a_key_on_the_command_line_may_repeat_an_alias_and_not_contradict_it(
    write: Write, minimal: str, backbone: str, alias: str, key: str
) -> None:
    path = write(f"{minimal}{backbone}:\n  {alias}: 1\n")
    assert value_at(load_config(path, [f"astuner.{key}=1"], backbone).config, tuple(f"astuner.{key}".split("."))) == 1
    with pytest.raises(ConfigError, match=rf"{alias} is 1, and astuner\.{key}, .* is 2 \(command line\)"):
        load_config(path, [f"astuner.{key}=2"], backbone)


@pytest.mark.parametrize(
    "section",
    [
        "  trainer:\n    max_token_len_per_gpu: 13000\n",
        "  trainer.max_token_len_per_gpu: 13000\n",
        "  trainer: {+max_token_len_per_gpu: 13000}\n",
    ],
)
def test_an_alias_may_be_nested_or_dotted(write: Write, minimal: str, section: str) -> None:
    loaded = load_config(write(f"{minimal}trinity:\n{section}"), backbone="trinity")
    assert loaded.config.astuner.trainer_common.max_tokens_per_micro_batch == 13000
    assert loaded.config.trinity == {}
    (notice,) = [notice for notice in loaded.notices if "max_token_len_per_gpu" in notice]
    assert notice.endswith(
        "trinity.trainer.max_token_len_per_gpu is read as astuner.trainer_common.max_tokens_per_micro_batch; write "
        "astuner.trainer_common.max_tokens_per_micro_batch"
    )
    assert "run.yaml:" in notice


def test_an_alias_on_the_command_line_and_its_neighbours(write: Write, minimal: str) -> None:
    text = minimal + "trinity:\n  explorer.rollout_model.extra_engine_args: {max_num_seqs: 9, swap_space: 4}\n"
    loaded = load_config(write(text), ["trinity.model.max_response_tokens=77"], backbone="trinity")
    assert loaded.config.astuner.rollout.max_num_seqs == 9
    assert loaded.config.astuner.rollout.max_response_length_in_one_turn == 77
    assert loaded.config.trinity == {"explorer.rollout_model.extra_engine_args": {"swap_space": 4}}


def test_an_alias_of_another_backbone_is_not_read(write: Write, minimal: str) -> None:
    loaded = load_config(write(minimal + "verl:\n  trainer.test_freq: 3\n"), backbone="trinity")
    assert loaded.config.astuner.trainer_common.test_freq == 20
    assert "not used by trinity: verl" in loaded.notices


def test_an_invalid_value_is_reported_at_the_alias(write: Write, minimal: str) -> None:
    path = write(minimal + "trinity:\n  trainer.max_token_len_per_gpu: many\n")
    with pytest.raises(
        ConfigError, match=r"run\.yaml:6: astuner\.trainer_common\.max_tokens_per_micro_batch is 'many'"
    ):
        load_config(path, backbone="trinity")


def test_two_aliases_must_not_contradict_each_other(write: Write, minimal: str) -> None:
    path = write(minimal + "trinity:\n  trainer.grad_clip: 1.0\n  algorithm.optimizer.clip_grad: 2.0\n")
    with pytest.raises(
        ConfigError, match=r"clip_grad is 2\.0, and astuner\.trainer_common\.optim\.grad_clip, .* is 1\.0"
    ):
        load_config(path, backbone="trinity")


@pytest.mark.parametrize(
    ("backbone", "line", "message"),
    [
        (
            "trinity",
            "trainer.save_interval: 7",
            r"trinity\.trainer\.save_interval is 7; expected a multiple of \S+\.mini_batch_num \(2\); change it, or ",
        ),
        (
            "verl",
            "actor_rollout_ref.actor.ppo_mini_batch_size: 7",
            r"ppo_mini_batch_size is 7; expected a divisor of \S+\.train_batch_size \(32\); change it, or set ",
        ),
    ],
)
def test_products_and_quotients_must_be_whole(
    write: Write, minimal: str, backbone: str, line: str, message: str
) -> None:
    path = write(f"{minimal}{backbone}:\n  {line}\n")
    overrides = ["astuner.trainer_common.mini_batch_num=2"] if backbone == "trinity" else []
    with pytest.raises(ConfigError, match=message):
        load_config(path, overrides, backbone=backbone)


def test_null_says_nothing(write: Write, minimal: str) -> None:
    loaded = load_config(write(minimal + "trinity:\n  cluster.gpu_per_node: null\n"), backbone="trinity")
    assert loaded.config.astuner.trainer_common.n_gpus_per_node is None
    assert loaded.config.trinity == {}
