"""Conditions under which keys have no effect; the keys name them in `key(no_effect=...)`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from astuner.config.algorithms import ALGORITHMS
from astuner.config.corrections import CORRECTIONS, CorrectionSpec
from astuner.config.gpus import MIN_GPUS_OF_TRINITY, visible_gpus
from astuner.config.section import Condition

if TYPE_CHECKING:
    from astuner.config.data import TaskJudgeConfig, TaskReaderConfig
    from astuner.config.rollout import RolloutConfig
    from astuner.config.root import AstunerConfig


def samples_in_validation(run: AstunerConfig) -> bool:
    """Return whether validation samples; it is greedy without `do_sample`, and at temperature 0."""
    return run.rollout.val_kwargs.do_sample and run.rollout.val_kwargs.temperature > 0


def uses_starting_model(rollout: RolloutConfig) -> bool:
    """Return whether the starting model answers for an agent."""
    return any(model.model == "starting_model" and model.base_url is None for model in rollout.frozen_models.values())


def _starts_env_service(reader: TaskReaderConfig) -> bool:
    parts = reader.mixture if reader.type == "mixture" else [reader]
    return any(part.type == "env_service" and part.env_service.env_url == "auto" for part in parts)


def _may_ask_a_model(judge: TaskJudgeConfig) -> bool:
    """Return whether a judge may ask the helper model: the user's judges and some of astuner's."""
    path = judge.judge_protocol or "astuner."
    return (
        judge.judge_type == "rubrics_auto_grader"
        or not path.startswith("astuner.")
        or path.startswith("astuner.task_judge.llm.")
        or path.endswith("->MathAnswerAndLlmAsJudge")
        or "->" in str(judge.params)  # of a judge that is composed of others
    )


def is_cut(rollout: RolloutConfig) -> bool:
    """Return whether top-p or top-k restricts sampling in training; they have no effect on greedy sampling."""
    return rollout.temperature > 0 and (rollout.top_p < 1 or rollout.top_k > 0)


def has_ratio(run: AstunerConfig) -> bool:
    """Return whether the loss contains the ratio of the policy to the policy before the step."""
    reinforcement = ALGORITHMS[run.trainer_common.algorithm.adv_estimator].reinforcement
    return reinforcement is not None and reinforcement.loss.has_ratio


def _has_mode(run: AstunerConfig, holds: Callable[[CorrectionSpec], bool]) -> bool:
    """Return whether the correction's mode is not auto, and its specification meets a condition."""
    mode = run.trainer_common.correction.mode
    return mode != "auto" and holds(CORRECTIONS[mode])


FOR_SFT = Condition("for sft", lambda run: run.trainer_common.algorithm.adv_estimator == "sft")
WITHOUT_COMMAND = Condition("while workflow.command is null", lambda run: run.workflow.command is None)
WITHOUT_KL_LOSS = Condition("while use_kl_loss is false", lambda run: not run.trainer_common.use_kl_loss)
KL_LOSS_COEF_0 = Condition("while kl_loss_coef is 0", lambda run: run.trainer_common.kl_loss_coef == 0)
WITHOUT_KL_IN_REWARD = Condition(
    "while algorithm.use_kl_in_reward is false", lambda run: not run.trainer_common.algorithm.use_kl_in_reward
)
KL_COEF_0 = Condition("while algorithm.kl_coef is 0", lambda run: run.trainer_common.algorithm.kl_coef == 0)
GREEDY_VALIDATION = Condition(
    "while rollout.val_kwargs.do_sample is false (validation is greedy)",
    lambda run: not run.rollout.val_kwargs.do_sample,
)
WITHOUT_LORA = Condition("while model.lora.rank is 0", lambda run: run.model.lora.rank == 0)
EXCEPT_FOR_SFT = Condition(
    "except for sft: the sampler and the trainer have to agree", lambda run: not FOR_SFT.holds(run)
)


def _on_tinker_server(run: AstunerConfig) -> bool:
    """Return whether a Tinker server of the run's own samples and trains, as `trinity.backbone.on_gpus` decides."""
    device = run.trainer_common.device
    has_gpus = device == "cuda" or (device == "auto" and visible_gpus() >= MIN_GPUS_OF_TRINITY)
    return run.backbone == "trinity" and (run.model.lora.rank > 0 or not has_gpus)


def _verl_on_cpu(run: AstunerConfig) -> bool:
    device = run.trainer_common.device
    return run.backbone == "verl" and (device == "cpu" or (device == "auto" and visible_gpus() == 0))


TINKER_SERVER = Condition(
    "where a Tinker server samples and trains, as for trinity with adapters or fewer than two GPUs",
    _on_tinker_server,
)
VERL_ON_CPU = Condition("for verl on a CPU, whose memory holds everything anyway", _verl_on_cpu)
WITHOUT_OVER_ROLLOUT = Condition(
    "while asynchrony.over_rollout is 0", lambda run: run.backbone == "trinity" and run.asynchrony.over_rollout == 0
)
CONSTANT_LR = Condition(
    "while optim.lr_scheduler is constant", lambda run: run.trainer_common.optim.lr_scheduler == "constant"
)
AUTO_CORRECTION = Condition(
    "while trainer_common.correction.mode is auto", lambda run: run.trainer_common.correction.mode == "auto"
)
NO_WEIGHTS = Condition(
    "while trainer_common.correction.mode has no weights",
    lambda run: _has_mode(run, lambda spec: spec.weights is None),
)
TRUNCATED_WEIGHTS = Condition(
    "unless trainer_common.correction.mode masks weights", lambda run: _has_mode(run, lambda spec: not spec.masks)
)
NO_REJECTION = Condition(
    "while trainer_common.correction.mode leaves out no call",
    lambda run: _has_mode(run, lambda spec: spec.rejects is None),
)
NO_REJECTION_FROM_BELOW = Condition(
    "unless trainer_common.correction.mode is a geo_rs mode",
    lambda run: _has_mode(run, lambda spec: spec.rejects != "geometric"),
)
WITHOUT_REFILL = Condition(
    "unless trainer_common.algorithm.dynamic_sampling is refill",
    lambda run: run.trainer_common.algorithm.dynamic_sampling != "refill",
)
ONE_MINI_BATCH = Condition(
    "while trainer_common.mini_batch_num is 1", lambda run: run.trainer_common.mini_batch_num == 1
)
NOT_GDPO = Condition(
    "unless trainer_common.algorithm.adv_estimator is gdpo",
    lambda run: run.trainer_common.algorithm.adv_estimator != "gdpo",
)
NOT_GIGPO = Condition(
    "unless trainer_common.algorithm.adv_estimator is gigpo",
    lambda run: run.trainer_common.algorithm.adv_estimator != "gigpo",
)
WITHOUT_MADNESS_CHECKS = Condition(
    "while rollout.compute_madness_checklist is empty", lambda run: not run.rollout.compute_madness_checklist
)
WITHOUT_JUDGE = Condition("without a task_judge.judge_protocol", lambda run: not run.task_judge.has_judge)
LEARNED_RUBRICS = Condition(
    "while task_judge.judge_type is rubrics_auto_grader", lambda run: run.task_judge.learns_rubrics
)
WITHOUT_OWN_ENV_SERVICE = Condition(
    "without an env_url: auto of task_reader.env_service", lambda run: not _starts_env_service(run.task_reader)
)
NO_JUDGE_MODEL = Condition(
    "because the judge asks no other model", lambda run: not _may_ask_a_model(run.task_judge), at_default=True
)
WITH_FRAMEWORK = Condition(
    "while rollout.use_agentscope_protocol is true", lambda run: run.rollout.use_agentscope_protocol, at_default=True
)
NOT_SLIDING_WINDOW = Condition(
    "unless context_tracker.context_tracker_type is sliding_window",
    lambda run: run.context_tracker.context_tracker_type != "sliding_window",
)
NOT_LINEAR_THINK = Condition(
    "unless context_tracker.context_tracker_type is linear_think",
    lambda run: run.context_tracker.context_tracker_type != "linear_think",
)
NOT_AUTO_CONTEXT = Condition(
    "unless context_tracker.context_tracker_type is auto_context",
    lambda run: run.context_tracker.context_tracker_type != "auto_context",
)
OWN_SUMMARIES = Condition(
    "while context_tracker.auto_context_cm.base_url is null",
    lambda run: run.context_tracker.auto_context_cm.base_url is None,
)
OTHER_JUDGE_TYPE = Condition(
    "unless task_judge.judge_type is rubrics_auto_grader",
    lambda run: run.task_judge.judge_type != "rubrics_auto_grader",
)
NOT_DATASET_FILE = Condition(
    "unless task_reader.type is dataset_file", lambda run: run.task_reader.type != "dataset_file"
)
NOT_HUGGING_FACE = Condition(
    "unless task_reader.type is huggingface_dat_repo", lambda run: run.task_reader.type != "huggingface_dat_repo"
)
NOT_ENV_SERVICE = Condition("unless task_reader.type is env_service", lambda run: run.task_reader.type != "env_service")
NOT_RANDOM_DUMMY = Condition(
    "unless task_reader.type is random_dummy", lambda run: run.task_reader.type != "random_dummy"
)
NOT_SEEDS = Condition("unless task_reader.type is seeds", lambda run: run.task_reader.type != "seeds")
NOT_FEEDBACK_TRACING = Condition(
    "unless task_reader.type is feedback_tracing", lambda run: run.task_reader.type != "feedback_tracing"
)
NOT_DATA_GENERATION = Condition(
    "unless task_reader.type is data_generation", lambda run: run.task_reader.type != "data_generation"
)
NOT_MIXTURE = Condition("unless task_reader.type is mixture", lambda run: run.task_reader.type != "mixture")
NOT_CUSTOM_READER = Condition(
    "unless task_reader.type is `package.module->Class`", lambda run: "->" not in run.task_reader.type
)
WITHOUT_CURRICULUM = Condition(
    "while task_reader.curriculum.enable is false", lambda run: not run.task_reader.curriculum.enable
)
SAMPLED_ELSEWHERE = Condition(
    "while debug.base_url names a server that samples",
    lambda run: run.backbone == "debug" and bool(run.debug.base_url),
)
WITHOUT_BASE_URL = Condition("without a debug.base_url", lambda run: run.backbone == "debug" and not run.debug.base_url)
WITHOUT_OWN_VLLM = Condition(
    "unless rollout.name is vllm and debug.base_url is null",
    lambda run: run.backbone == "debug" and (run.rollout.name != "vllm" or bool(run.debug.base_url)),
)
NO_TEACHER = Condition(
    "while trainer_common.distillation.teacher is null", lambda run: run.trainer_common.distillation.teacher is None
)
NO_TEACHER_SERVER = Condition(
    "unless trainer_common.distillation.teacher is the URL of a server",
    lambda run: not (run.trainer_common.distillation.teacher or "").startswith(("http://", "https://")),
)
