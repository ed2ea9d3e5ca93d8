"""Judges that combine other judges: a weighted sum, and a judge that counts only if another one passes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError, PluginError, UnscoredError, short_repr
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge, make_judge
from astuner.task_judge.scoring import judgement_of


class WeightedJudge(BaseJudge):
    """The weighted sum of several judges' rewards; the judges run concurrently.

    The judges' rewards are the components of the reward, under the judges' names. The components of a judge
    follow as `NAME.COMPONENT`. If a judge rewards agents or LLM calls, the sum also rewards them; the other judges add
    their reward to each of them. If a judge cannot score the episode, the episode is unscored.

    Args:
        judges: the judges by name. In YAML, each has `judge_protocol`, `weight` (default 1) and `params`.
        weights: the weights by name, for judges that are created in Python; in YAML, the judges have them.
        success: the judges that decide whether the task is solved: `all`, `any`, or the name of a judge.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        judges: Mapping[str, BaseJudge],
        weights: Mapping[str, float] | None = None,
        success: Literal["all", "any"] | str = "all",
    ) -> None:
        super().__init__(config)
        if not judges:
            raise ValueError("judges is empty; expected a mapping of names to judges")
        if success not in ("all", "any", *judges):
            raise ValueError(f"success is {success!r}; expected all, any, or one of {', '.join(judges)}")
        self.judges, self.success = dict(judges), success
        self.weights = dict.fromkeys(judges, 1.0) | dict(weights or {})
        if unknown := sorted(self.weights.keys() - judges.keys()):
            raise ValueError(f"weights has {', '.join(unknown)}; expected names in judges: {', '.join(judges)}")

    @classmethod
    def from_params(cls, config: TaskJudgeConfig, params: Mapping[str, Any], search: Sequence[Path] = ()) -> Self:
        """Create the judge and its judges; see `BaseJudge.from_params`.

        Raises:
            PluginError: the entry of a judge is invalid, or its judge cannot be created.
        """
        entries = params["judges"]
        if not isinstance(entries, Mapping):
            raise PluginError(
                f"task_judge.params.judges is {short_repr(entries)}; expected a mapping of names to judges"
            )
        if "weights" in params:
            raise PluginError("task_judge.params.weights: in a configuration, set the weight of each entry of judges")
        judges = {
            str(name): _child(f"task_judge.params.judges.{name}", entry, config, search, more=("weight",))
            for name, entry in entries.items()
        }
        weights = {}
        for name, entry in entries.items():
            weight = entry.get("weight", 1.0)
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not math.isfinite(weight):
                raise PluginError(f"task_judge.params.judges.{name}.weight is {short_repr(weight)}; expected a number")
            weights[str(name)] = float(weight)
        return cls(config, judges=judges, **{"weights": weights, **{k: v for k, v in params.items() if k != "judges"}})

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode with all judges.

        Raises:
            EpisodeError: a judge failed.
            UnscoredError: a judge cannot score the episode.
        """
        results = await asyncio.gather(
            *(judgement_of(judge, workflow_task, workflow_output) for judge in self.judges.values()),
            return_exceptions=True,
        )
        parts: dict[str, Judgement] = {}
        for name, result in zip(self.judges, results, strict=True):
            if isinstance(result, BaseException):
                raise result
            parts[name] = _scored(name, result)
        solved = {name: bool(part.is_success) for name, part in parts.items()}
        decides = {"all": all, "any": any}.get(self.success)
        rewards = {name: part.reward or 0.0 for name, part in parts.items()}
        agents = sorted({agent for part in parts.values() for agent in part.agent_rewards})
        calls = {len(part.call_rewards) for part in parts.values() if part.call_rewards}
        if len(calls) > 1 or (calls and agents):
            raise JudgeError("the judges of a WeightedJudge reward agents and calls, or different numbers of calls")
        return Judgement(
            reward=None if agents or calls else sum(self.weights[name] * reward for name, reward in rewards.items()),
            is_success=decides(solved.values()) if decides else solved[self.success],
            components=_components(parts),
            agent_rewards={
                agent: sum(self.weights[n] * part.agent_rewards.get(agent, rewards[n]) for n, part in parts.items())
                for agent in agents
            },
            call_rewards=tuple(
                sum(
                    self.weights[n] * (p.call_rewards[call] if p.call_rewards else rewards[n]) for n, p in parts.items()
                )
                for call in range(max(calls, default=0))
            ),
            **_notes(parts),
        )

    def close(self) -> None:
        """Close the judges."""
        for judge in self.judges.values():
            judge.close()


class GatedJudge(BaseJudge):
    """The reward of a judge, for episodes that another judge, the gate, has passed.

    The gate passes an episode if its `is_success` is true. The judge does not run for other episodes, which have
    `failed_reward` and are not solved. The reward's components are `gate` and `judge`, and the components of both
    as `gate.COMPONENT` and `judge.COMPONENT`.

    Args:
        gate: the judge that runs first. In YAML, `gate` and `judge` have `judge_protocol` and `params`.
        judge: the judge of the episodes that pass.
        failed_reward: the reward of the other episodes.
    """

    def __init__(
        self, config: TaskJudgeConfig, *, gate: BaseJudge, judge: BaseJudge, failed_reward: float = 0.0
    ) -> None:
        super().__init__(config)
        self.gate, self.judge, self.failed_reward = gate, judge, failed_reward

    @classmethod
    def from_params(cls, config: TaskJudgeConfig, params: Mapping[str, Any], search: Sequence[Path] = ()) -> Self:
        """Create the judge and its judges; see `BaseJudge.from_params`.

        Raises:
            PluginError: the entry of a judge is invalid, or its judge cannot be created.
        """
        children = {
            name: _child(f"task_judge.params.{name}", params[name], config, search) for name in ("gate", "judge")
        }
        return cls(config, **{**params, **children})

    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode.

        Raises:
            EpisodeError: a judge failed.
            UnscoredError: a judge cannot score the episode.
        """
        gate = _scored("gate", await judgement_of(self.gate, workflow_task, workflow_output))
        if not gate.is_success:
            parts = {"gate": gate}
            components = {**_components(parts), "judge": self.failed_reward}
            return Judgement(self.failed_reward, False, components, **_notes(parts))
        judged = _scored("judge", await judgement_of(self.judge, workflow_task, workflow_output))
        parts = {"gate": gate, "judge": judged}
        return Judgement(
            judged.reward,
            judged.is_success,
            _components(parts),
            agent_rewards=judged.agent_rewards,
            call_rewards=judged.call_rewards,
            **_notes(parts),
        )

    def close(self) -> None:
        """Close both judges."""
        self.gate.close()
        self.judge.close()


def _child(
    setting: str, entry: object, config: TaskJudgeConfig, search: Sequence[Path], more: Sequence[str] = ()
) -> BaseJudge:
    keys = ("judge_protocol", "params", *more)
    if not isinstance(entry, Mapping) or not isinstance(entry.get("judge_protocol"), str):
        raise PluginError(
            f"{setting} is {short_repr(entry)}; expected a mapping with judge_protocol: package.module->Class"
        )
    if unknown := [str(key) for key in entry if key not in keys]:
        raise PluginError(f"{setting} has no key {', '.join(unknown)}; its keys are {', '.join(keys)}")
    params = entry.get("params") or {}
    if not isinstance(params, Mapping):
        raise PluginError(f"{setting}.params is {short_repr(params)}; expected a mapping")
    return make_judge(entry["judge_protocol"], config, params, search, setting=setting)


def _scored(name: str, judgement: Judgement) -> Judgement:
    """Return a judgement that has a reward; raise `UnscoredError` for another one."""
    if judgement.reward is None:
        raise UnscoredError(f"{name}: {judgement.explanation or 'no reward'}", judgement.unscored_cause)
    return judgement


def _components(parts: Mapping[str, Judgement]) -> dict[str, float]:
    """Return the reward of each judge under its name, and its components as `NAME.COMPONENT`."""
    components: dict[str, float] = {}
    for name, part in parts.items():
        components[name] = part.reward or 0.0
        components.update({f"{name}.{component}": value for component, value in part.components.items()})
    return components


def _notes(parts: Mapping[str, Judgement]) -> dict[str, Any]:
    """Return the explanation, metadata and metrics of the judges."""
    return {
        "explanation": "\n".join(f"{name}: {part.explanation}" for name, part in parts.items() if part.explanation),
        "metadata": {name: part.metadata for name, part in parts.items() if part.metadata},
        "metrics": {f"{name}.{key}": value for name, part in parts.items() for key, value in part.metrics.items()},
    }
