"""Checks that look at several keys together."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.config.keys import KeyPath, parts, schema, value_at
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig, RunConfig

GROUP_ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")
"""Algorithms that compare the episodes of one task with each other."""

_KL_LOSS = ("astuner.trainer_common.kl_loss_coef", "astuner.trainer_common.kl_loss_type")
_ALGORITHM = "astuner.trainer_common.algorithm"
_KL_REWARD = (f"{_ALGORITHM}.kl_coef", f"{_ALGORITHM}.kl_penalty")
_POLICY_GRADIENT = tuple(
    f"{_ALGORITHM}.{name}"
    for name in ("clip_ratio_low", "clip_ratio_high", "norm_adv_by_std", "use_kl_in_reward", "overlong_buffer_length")
)


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, keys=tuple(parts(key) for key in keys))


def inconsistencies(config: RunConfig) -> Iterator[Problem]:
    """Everything that is missing, or that contradicts something else."""
    yield from _missing(config.astuner)
    yield from _contradictions(config.astuner)


def _missing(run: AstunerConfig) -> Iterator[Problem]:
    if not run.model.path:
        yield _problem(
            "the model to train is missing; add `path: Qwen/Qwen2.5-7B-Instruct` under `astuner:`, `model:`",
            "astuner.model.path",
        )
    supervised = run.trainer_common.algorithm.adv_estimator == "sft"
    if not supervised and not run.rollout.agentscope_workflow:
        yield _problem(
            "the workflow to tune is missing; add `agentscope_workflow: package.module->Class` under `astuner:`, "
            "`rollout:`",
            "astuner.rollout.agentscope_workflow",
        )
    if run.task_reader.type == "dataset_file" and not run.task_reader.dataset_file.training.file_path:
        yield _problem(
            "task_reader.type is dataset_file and no file is named; add `file_path: tasks.jsonl` under `astuner:`, "
            "`task_reader:`, `dataset_file:`, `training:`",
            "astuner.task_reader.dataset_file.training.file_path",
        )


def _contradictions(run: AstunerConfig) -> Iterator[Problem]:
    rollout, trainer = run.rollout, run.trainer_common
    if rollout.max_response_length_in_one_turn > rollout.max_model_len:
        yield _problem(
            f"astuner.rollout.max_response_length_in_one_turn ({rollout.max_response_length_in_one_turn}) is more "
            f"than astuner.rollout.max_model_len ({rollout.max_model_len}), which bounds prompt and answer together; "
            "lower the first or raise the second",
            "astuner.rollout.max_response_length_in_one_turn",
            "astuner.rollout.max_model_len",
        )
    episodes = run.data.train_batch_size * rollout.num_repeat
    if trainer.mini_batch_num > episodes:
        yield _problem(
            f"astuner.trainer_common.mini_batch_num ({trainer.mini_batch_num}) is more than a step has episodes: "
            f"astuner.data.train_batch_size ({run.data.train_batch_size}) × astuner.rollout.num_repeat "
            f"({rollout.num_repeat}) = {episodes}",
            "astuner.trainer_common.mini_batch_num",
            "astuner.data.train_batch_size",
            "astuner.rollout.num_repeat",
        )
    algorithm = trainer.algorithm.adv_estimator
    if algorithm in GROUP_ALGORITHMS and rollout.num_repeat < 2:
        yield _problem(
            f"{algorithm} compares the episodes of one task, so astuner.rollout.num_repeat must be at least 2, "
            f"and it is {rollout.num_repeat}",
            "astuner.rollout.num_repeat",
            "astuner.trainer_common.algorithm.adv_estimator",
        )


def without_effect(config: RunConfig) -> Iterator[str]:
    """Notices about keys that were set and mean nothing beside the value of another key."""
    trainer = config.astuner.trainer_common
    if not trainer.use_kl_loss:
        yield from _idle(config, _KL_LOSS, "while use_kl_loss is false")
    if not trainer.algorithm.use_kl_in_reward:
        yield from _idle(config, _KL_REWARD, "while algorithm.use_kl_in_reward is false")
    if trainer.algorithm.adv_estimator == "sft":
        yield from _idle(config, _POLICY_GRADIENT, "for sft")
    else:
        yield from _idle(config, (f"{_ALGORITHM}.prompt_loss_weight",), "except for sft")


def _idle(config: RunConfig, keys: tuple[str, ...], when: str) -> Iterator[str]:
    changed = [key for key in keys if is_changed(config, parts(key))]
    if changed:
        yield f"no effect {when}: {', '.join(changed)}"


def is_changed(config: RunConfig, key: KeyPath) -> bool:
    """Whether a key has another value than its default."""
    return value_at(config, key) != schema().keys[key].default
