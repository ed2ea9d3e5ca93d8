"""The user's agent and judge, loaded into the process that runs their episodes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from astuner.backbone.training.episode_placement import check_agent_named, runs_inline
from astuner.config.root import AstunerConfig
from astuner.config.services import api_key
from astuner.config.workflow import SUMMARY_TARGET
from astuner.doors import through_door
from astuner.env_service.episodes import EpisodeEnvironments
from astuner.gateway.http_server import Gateway
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.task_judge.judge_base import BaseJudge, make_judge
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_runner.runner import TaskRunner
from astuner.tools import sandbox_agentscope
from astuner.workflow import Workflow, load_workflow

if TYPE_CHECKING:
    from astuner.backbone.episode_workers.messages import AgentJob


def load_agent(job: AgentJob, codec: ChatCodec) -> EpisodesHere:
    """Load workflow and judge; return what runs their episodes in this process, without an engine.

    AstunerError: one cannot be loaded.
    """
    config, search = job.config, job.search
    check_agent_named(config)
    workflow: Callable[[], Workflow]
    if config.rollout.agentscope_workflow:
        workflow = load_workflow(config.rollout.agentscope_workflow, search=search)
    else:
        kind = "environment" if config.workflow.command is None else "command"
        workflow = through_door("workflow", kind)(config, search)
    judge: BaseJudge | None = None
    if job.rubrics is not None:
        judge = through_door("judge", "rubrics_grader")(config.task_judge, job.rubrics)
    elif config.task_judge.judge_protocol:
        judge = make_judge(config.task_judge.judge_protocol, config.task_judge, config.task_judge.params, search)
    sandbox_agentscope(enabled=config.rollout.sandbox)
    runner = TaskRunner(
        workflow=workflow,
        judge=judge,
        engine=None,
        codec=codec,
        episode_timeout=config.rollout.episode_timeout,
        judge_timeout=config.task_judge.timeout,
        max_samples=config.rollout.multi_turn.max_sample_per_task,
        targets=_targets(config),
        merge="none" if config.update.pack == "none" else "leaf",
        madness_reward=config.rollout.agent_madness_reward,
        on_max_steps=config.rollout.multi_turn.on_max_steps,
        judge_inline=runs_inline(config),
        gateway=Gateway(config.gateway, (config.model.path, job.model_path)),
        environments=EpisodeEnvironments(job.env_services),
    )
    return EpisodesHere(runner)


def _targets(config: AstunerConfig) -> Targets:
    """Return which workflow agents are trained, and the models for the agents that are not."""
    frozen = {}
    for tag, model in config.rollout.frozen_models.items():
        key = api_key(f"rollout.frozen_models.{tag}.api_key_env", model.api_key_env)
        # The client requires a key even if the endpoint does not.
        frozen[tag] = FrozenModel(model.model, model.base_url, key or "none")
    history = config.context_tracker
    if not config.rollout.use_agentscope_protocol and history.auto_context_cm.base_url is not None:
        key = api_key("context_tracker.auto_context_cm.api_key_env", history.auto_context_cm.api_key_env)
        url = history.auto_context_cm.base_url
        frozen[SUMMARY_TARGET] = FrozenModel(history.alien_llm_model, url, key or "none", SUMMARY_TARGET)
    trainable = config.rollout.trainable_targets
    return Targets(None if trainable is None else tuple(trainable), frozen, config.workflow.agents)
