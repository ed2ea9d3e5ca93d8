"""The built-in agent loop: a workflow that plays the environment of its task."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from astuner.config.agent_loop import ContextTrackerConfig
from astuner.config.root import AstunerConfig
from astuner.errors import CallLimitError, ContextLengthError, WorkflowError
from astuner.model_tuner import DEFAULT_TARGET, ModelTuner
from astuner.schema import EnvInstance, Evaluation, WorkflowOutput, WorkflowTask
from astuner.workflow import Workflow
from astuner.workflows.agent_loop.actions import ActionForm, ActionReader, UnreadableActionError
from astuner.workflows.agent_loop.histories import make_history
from astuner.workflows.agent_loop.players import ModelPlayer, Player, load_player
from astuner.workflows.agent_loop.rewards import SeatRewards


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the agent loop.

    Attributes:
        action_form: the form of actions. `auto` is the form that the task prefers, with one exception: `tool_call`
            replaces `code` for environments with tools.
        history: the configuration of the history managers.
        step_rewards: `sum`: every call gets the rewards of its seat in the whole episode. `returns_to_go`: a call gets
            the rewards of its own step and of the later ones.
        gamma: the discount of the rewards over the steps of an agent.
        has_judge: whether a judge scores the episodes.
        players: the programs that play seats, by the name of the seat. The model plays the others.
    """

    action_form: ActionForm | Literal["auto"] = "auto"
    history: ContextTrackerConfig = field(default_factory=ContextTrackerConfig)
    step_rewards: Literal["sum", "returns_to_go"] = "sum"
    gamma: float = 1.0
    has_judge: bool = False
    players: Mapping[str, Callable[[str, int], Player]] = field(default_factory=dict)


@dataclass(eq=False)
class EnvWorkflow(Workflow):
    """Plays a task's environment step by step, with one tracker agent for each seat."""

    settings: LoopSettings = field(default_factory=LoopSettings)
    name: str = "agent loop"
    episode_metadata: dict[str, Any] = field(default_factory=dict, init=False)
    _players: dict[str, Player] = field(default_factory=dict, init=False)
    _unreadable: int = field(default=0, init=False)

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        """Play until the environment ends, or no further LLM call is possible.

        Raises:
            WorkflowError: the task has no environment.
            EnvError: the environment failed.
            ContextLengthError: the first prompt of an agent is too long.
        """
        env = workflow_task.env
        if env is None:
            raise WorkflowError(
                f"rollout.use_agentscope_protocol is False, which plays the environment of a task, and task "
                f"{workflow_task.task_id} has no environment; set task_reader.type: env_service, or name a workflow in "
                "rollout.agentscope_workflow"
            )
        rewards = SeatRewards()
        ended_by = "environment"
        try:
            await self._play(workflow_task, env, model_tuner, rewards)
        except CallLimitError:
            ended_by = "max_steps"
        except ContextLengthError:
            # Later prompts grow with the seat's own play. The first prompt can only be shortened by the user.
            if sum(turn.seat == rewards.turns[-1].seat for turn in rewards.turns) == 1:
                raise
            ended_by = "context_length"
        rewards.end_turn(len(model_tuner.calls))
        self.episode_metadata["ended_by"] = ended_by
        return self._output(env, await env.evaluate(), model_tuner, rewards)

    def _reader(self, workflow_task: WorkflowTask, env: EnvInstance) -> ActionReader:
        if self.settings.action_form != "auto":
            return ActionReader(self.settings.action_form, env.tools)
        task = workflow_task.task.env
        preference = task.action_preference if task else "text"
        return ActionReader("tool_call" if preference == "code" and env.tools else preference, env.tools)

    async def _play(
        self, workflow_task: WorkflowTask, env: EnvInstance, tuner: ModelTuner, rewards: SeatRewards
    ) -> None:
        reader = self._reader(workflow_task, env)
        observation, is_done = env.observation, False
        while not is_done:
            seat = observation.agent
            if seat not in self._players:
                program = self.settings.players.get(seat)
                self._players[seat] = (
                    program(seat, workflow_task.seed) if program else self._model(seat, env, reader, tuner)
                )
            rewards.start_turn(seat, len(tuner.calls), env.observation.text)
            try:
                action = await self._players[seat].act(observation)
            except UnreadableActionError as error:
                self._unreadable += 1
                # The history may be too short to contain the observation.
                told = f"{error} Nothing has happened.\n\n{env.observation.text}"
                observation = replace(env.observation, text=told)
                continue
            result = await env.step(action)
            rewards.add(result.reward)
            observation, is_done = result.observation, result.is_done

    def _model(self, seat: str, env: EnvInstance, reader: ActionReader, tuner: ModelTuner) -> Player:
        """Return the model as the player of a seat. Each seat is an agent and a target of its own name."""
        model = tuner.for_agent(seat, target_tag=seat or DEFAULT_TARGET)
        instruction = "\n\n".join(filter(None, (env.profile.main_query, reader.instruction)))
        history = make_history(self.settings.history, model, reader.tools, env.profile.init_messages, instruction)
        return ModelPlayer(model, history, reader)

    def _output(
        self, env: EnvInstance, evaluation: Evaluation, tuner: ModelTuner, rewards: SeatRewards
    ) -> WorkflowOutput:
        settings, calls = self.settings, tuner.calls
        trained = {call.agent_name for call in calls if call.trained}
        # A game can end before the model's first turn.
        scores = evaluation.score if isinstance(evaluation.score, Mapping) else {"": evaluation.score}
        seats = trained or {call.agent_name for call in calls} or set(scores) - set(settings.players)
        if not seats:
            raise WorkflowError("rollout.players names a program for every seat, so there is nothing to train")
        totals = {seat: rewards.total(seat, settings.gamma) for seat in sorted(seats)}
        steps = rewards.steps(settings.gamma)
        reward: float | Mapping[str, float] | list[float] | None
        if settings.has_judge:
            reward = None
        elif settings.step_rewards == "returns_to_go":
            reward = [step.step_return for step in steps]
        elif set(totals) == {""}:
            reward = totals[""]
        else:
            reward = totals
        own_scores = [score for seat, score in scores.items() if seat in seats] or list(scores.values())
        mean_score = sum(own_scores) / len(own_scores)
        answer = next((call.messages[-1]["content"] for call in reversed(calls) if call.trained), "")
        return WorkflowOutput(
            reward=reward,
            is_success=mean_score > 0 if evaluation.is_success is None else evaluation.is_success,
            metadata={**self.episode_metadata, "final_answer": answer, "scores": dict(scores)},
            log_metrics={
                "env_steps": len(env.steps),
                "env_return": sum(totals.values()) / len(totals),
                "invalid_actions": sum(not step.is_valid for step in env.steps),
                "unreadable_actions": self._unreadable,
            },
            steps=steps,
        )


def environment_workflow(config: AstunerConfig, search: Sequence[Path]) -> Callable[[], Workflow]:
    """Return what creates the workflow of an episode, for `rollout.use_agentscope_protocol: False`.

    Args:
        config: the resolved configuration.
        search: the folders in which to search for the players' `package.module->Name`.

    Raises:
        PluginError: a player cannot be loaded.
    """
    settings = LoopSettings(
        action_form=config.rollout.action_form,
        history=config.context_tracker,
        step_rewards=config.rollout.step_rewards,
        gamma=config.rollout.gamma,
        has_judge=config.task_judge.has_judge,
        players={seat: load_player(player, search=search) for seat, player in config.rollout.players.items()},
    )
    return partial(EnvWorkflow, settings)
