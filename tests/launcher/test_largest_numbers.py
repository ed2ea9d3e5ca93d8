"""A run with every number at its upper bound."""

from __future__ import annotations

from typing import Any

from astuner.config.keys import dotted, schema
from astuner.config.section import plain_kinds
from tests.launcher.conftest import Command

# These determine how much a run does, contradict another key, or belong to another algorithm or protocol.
OTHERS = {
    "data.train_batch_size", "rollout.num_repeat", "rollout.val_kwargs.num_repeat", "trainer_common.val_pass_n",
    "trainer_common.total_training_steps", "trainer_common.mini_batch_num", "trainer_common.n_gpus_per_node",
    "trainer_common.nnodes", "rollout.gamma", "rollout.max_response_length_in_one_turn", "asynchrony.sync_interval",
    "trainer_common.algorithm.prompt_loss_weight", "trainer_common.algorithm.overlong_buffer_length",
    "context_tracker.alien_llm_response_length", "context_tracker.max_env_len", "model.lora.rank",
}  # fmt: skip


def test_every_number_may_have_its_largest_value(train: Command):
    settings = [
        f"{dotted(path[1:])}={bound}"
        for path, key in schema().keys.items()
        if {int, float} & set(plain_kinds(key.annotation))
        and dotted(path[1:]) not in OTHERS
        and (bound := upper_bound(path)) is not None
    ]
    assert len(settings) > 60
    ended = train(*settings)
    assert ended.code == 0, ended.out


def upper_bound(path: tuple[str, ...]) -> Any:
    allowed = schema().sections[path[:-1]].model_json_schema()["properties"][path[-1]]
    return next((branch["maximum"] for branch in allowed.get("anyOf", [allowed]) if "maximum" in branch), None)
