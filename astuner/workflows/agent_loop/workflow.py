"""The built-in agent loop: a workflow that plays the environment of its task; and its agents' rewards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from astuner.config.root import AstunerConfig
from astuner.config.workflow import ContextTrackerConfig
from astuner.errors import CallLimitError, ContextLengthError, WorkflowError
from astuner.model_tuner.targets import DEFAULT_TARGET
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import AgentStep, EnvInstance, Evaluation, WorkflowOutput, WorkflowTask
from astuner.workflow import Workflow
from astuner.workflows.agent_loop.histories import make_history
from astuner.workflows.agent_loop.players import (
    ActionForm,
    ActionReader,
    ModelPlayer,
    Player,
    UnreadableActionError,
    load_player,
)


def discounted_returns(rewards: Sequence[float], gamma: float) -> list[float]:
    """Return each step's discounted return: its reward plus `gamma` times the next step's return.

    Args:
        rewards: the rewards of the steps, in order.
        gamma: the discount of a step, from 0 to 1.
    """
    returns: list[float] = []
    for reward in reversed(rewards):
        returns.append(reward + gamma * (returns[-1] if returns else 0.0))
    return returns[::-1]


@dataclass
class SeatTurn:
    """A turn of a seat: its LLM calls, from index `first_call` to before `end_call`, and the reward until its next one.

    The calls are those that led to one action, including summaries of the history. `state` is the observation.
    """

    seat: str
    first_call: int
    end_call: int = 0
    reward: float = 0.0
    state: str = ""


@dataclass
class SeatRewards:
    """The turns of an environment's seats, in order, with their rewards.

    A reward that a seat receives in the turn of another one belongs to its own last turn, which led to it.
    """

    turns: list[SeatTurn] = field(default_factory=list)
    # Rewards of seats that have not acted yet.
    _early: dict[str, float] = field(default_factory=dict)

    def start_turn(self, seat: str, n_calls: int, state: str) -> None:
        """Start a turn with the observation `state`; the episode has `n_calls` LLM calls so far."""
        self.end_turn(n_calls)
        self.turns.append(SeatTurn(seat, n_calls, n_calls, self._early.pop(seat, 0.0), state))

    def end_turn(self, n_calls: int) -> None:
        """End the last turn, if there is one."""
        if self.turns:
            self.turns[-1].end_call = n_calls

    def add(self, reward: float | Mapping[str, float]) -> None:
        """Add a step's reward: a number for the seat that has acted, or several seats' rewards by name."""
        acted = self.turns[-1].seat
        for seat, value in (reward if isinstance(reward, Mapping) else {acted: reward}).items():
            last = next((turn for turn in reversed(self.turns) if turn.seat == seat), None)
            if last is None:
                self._early[seat] = self._early.get(seat, 0.0) + value
            else:
                last.reward += value

    def total(self, seat: str, gamma: float) -> float:
        """Return a seat's total reward, where `gamma` discounts a reward once for each earlier turn of the seat."""
        return self._returns(gamma).get(seat, [self._early.get(seat, 0.0)])[0]

    def steps(self, gamma: float) -> list[AgentStep]:
        """Return one step for each LLM call, with its seat's discounted rewards from the call's turn on."""
        returns = {seat: iter(values) for seat, values in self._returns(gamma).items()}
        by_turn = [(turn, AgentStep(turn.state, next(returns[turn.seat]))) for turn in self.turns]
        return [step for turn, step in by_turn for _ in range(turn.first_call, turn.end_call)]

    def _returns(self, gamma: float) -> dict[str, list[float]]:
        """Return, for each seat, the discounted rewards from each of its turns on."""
        rewards: dict[str, list[float]] = {}
        for turn in self.turns:
            rewards.setdefault(turn.seat, []).append(turn.reward)
        return {seat: discounted_returns(values, gamma) for seat, values in rewards.items()}


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """Settings of the agent loop.

    Attributes:
        action_form: the form of actions. `auto` is the form that the task prefers, with one exception: `tool_call`
            replaces `code` for environments with tools.
        step_rewards: `sum`: every call gets the rewards of its seat in the whole episode. `returns_to_go`: a call gets
            the rewards of its own step and of the later ones.
        gamma: the discount of rewards over an agent's steps.
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

    async def _play(
        self, workflow_task: WorkflowTask, env: EnvInstance, tuner: ModelTuner, rewards: SeatRewards
    ) -> None:
        form = self.settings.action_form
        if form == "auto":
            preference = workflow_task.task.env.action_preference if workflow_task.task.env else "text"
            form = "tool_call" if preference == "code" and env.tools else preference
        reader = ActionReader(form, env.tools)
        observation, is_done = env.observation, False
        while not is_done:
            seat = observation.agent
            if seat not in self._players:
                self._players[seat] = self._player(seat, workflow_task.seed, env, reader, tuner)
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

    def _player(self, seat: str, seed: int, env: EnvInstance, reader: ActionReader, tuner: ModelTuner) -> Player:
        """Return a seat's program, or else the model. Each seat is an agent and a target of its own name."""
        if program := self.settings.players.get(seat):
            return program(seat, seed)
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
    """Return what creates an episode's workflow for `rollout.use_agentscope_protocol: False`; players are in `search`.

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
