"""Checks that look at several keys together."""

from __future__ import annotations

from collections.abc import Iterator

from astuner.config.keys import is_changed, parts, value_at
from astuner.config.problems import Problem
from astuner.config.root import AstunerConfig, RunConfig

GROUP_ALGORITHMS = ("grpo", "dr_grpo", "dapo", "rloo", "gspo", "cispo")
"""Algorithms that compare the episodes of one task with each other."""

_ALGORITHM = "astuner.trainer_common.algorithm"
_REINFORCEMENT_ONLY = (
    "clip_ratio_low",
    "clip_ratio_high",
    "norm_adv_by_std",
    "use_kl_in_reward",
    "overlong_buffer_length",
)


def _problem(text: str, *keys: str) -> Problem:
    return Problem(text, keys=tuple(parts(key) for key in keys))


def inconsistencies(config: RunConfig) -> Iterator[Problem]:
    """Everything that is missing, or that contradicts something else."""
    yield from _missing(config.astuner)
    yield from _contradictions(config.astuner)
    yield from _unused_by_algorithm(config)


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
    if trainer.algorithm.adv_estimator == "sft":  # it rolls nothing out
        return
    yield from _wrong_targets(run)
    yield from _too_stale(run)
    buffer = trainer.algorithm.overlong_buffer_length
    if buffer > run.data.max_response_length:
        yield _problem(
            f"{_ALGORITHM}.overlong_buffer_length ({buffer}) is more than astuner.data.max_response_length "
            f"({run.data.max_response_length}), the end of which it is; lower the first or raise the second",
            f"{_ALGORITHM}.overlong_buffer_length",
            "astuner.data.max_response_length",
        )
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


def _wrong_targets(run: AstunerConfig) -> Iterator[Problem]:
    trainable, frozen = run.rollout.trainable_targets, run.rollout.frozen_models
    if trainable is not None and not trainable:
        yield _problem(
            "rollout.trainable_targets is empty, so nothing would be trained; name the targets to train, or write "
            "null to train all",
            "astuner.rollout.trainable_targets",
        )
    for tag, model in frozen.items():
        key = "astuner.rollout.frozen_models"
        if trainable is None or tag in trainable:
            yield _problem(
                f"rollout.frozen_models names a model for {tag!r}, which is trained; leave it out, or name in "
                "rollout.trainable_targets only the targets to train",
                key,
                "astuner.rollout.trainable_targets",
            )
        if (model.base_url is None) != (model.model == "policy"):
            yield _problem(
                f"rollout.frozen_models.{tag} has model {model.model!r} and base_url {model.base_url!r}; give both to "
                "ask an endpoint, or neither to ask the model in training",
                key,
            )


def _too_stale(run: AstunerConfig) -> Iterator[Problem]:
    interval, staleness = run.asynchrony.sync_interval, run.asynchrony.max_staleness
    if interval > staleness + 1:
        old = interval - 1
        yield _problem(
            f"weights that are synced every astuner.asynchrony.sync_interval ({interval}) steps are up to "
            f"{old} steps old, and astuner.asynchrony.max_staleness is {staleness}; lower the first or raise the "
            "second",
            "astuner.asynchrony.sync_interval",
            "astuner.asynchrony.max_staleness",
        )


def _unused_by_algorithm(config: RunConfig) -> Iterator[Problem]:
    name = config.astuner.trainer_common.algorithm.adv_estimator
    unused: dict[str, str] = {}
    if name == "sft":
        reason = "it learns from transcripts and has no rewards, advantages or probability ratios"
        unused = dict.fromkeys(_REINFORCEMENT_ONLY, reason)
    else:
        unused["prompt_loss_weight"] = "it trains only what the model itself sampled; sft uses this key"
    if name == "rloo":
        reason = "its loss is REINFORCE's, which has no ratio to clip; dr_grpo has one"
        unused |= dict.fromkeys(("clip_ratio_low", "clip_ratio_high"), reason)
    for key, reason in unused.items():
        path = parts(f"{_ALGORITHM}.{key}")
        if is_changed(config, path):
            yield _problem(
                f"{_ALGORITHM}.{key} is {value_at(config, path)}, and algorithm {name} has no use for it: {reason}. "
                "Remove the key or choose another algorithm",
                f"{_ALGORITHM}.{key}",
                f"{_ALGORITHM}.adv_estimator",
            )
