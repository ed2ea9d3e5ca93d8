"""Checks environments without a model: scores for the reference and for wrong answers, repeatability, step times."""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from astuner.env_service.addresses import TOKEN_VARIABLE, EnvServiceAddress
from astuner.env_service.client import EnvServiceClient
from astuner.env_service.http_server import create_app
from astuner.env_service.instances import InstanceTable, ServiceLimits
from astuner.env_service.remote_instance import instance_path
from astuner.errors import EnvError, short_repr, shorten
from astuner.schema import Action, EnvTask, Evaluation, Observation, Reference, StepResult, TaskProfile

GARBAGE = "¤¤ ⁂ ¤¤"
"""The garbage answer. It has no letters and digits, of which a short answer could be a part."""
_SEED = 7
_WRONG_STEPS = 5
_TOLERANCE = 1e-6
_MAX_ERROR = 600


@dataclass(frozen=True)
class EnvValidation:
    """The result of checking an environment.

    Attributes:
        ok: whether it passes all checks.
        reference: the lowest score of a reference; None if the environment has none.
        empty, garbage: the highest score for an empty and for a garbage answer.
        deterministic: whether equal seeds and actions gave equal observations and rewards.
        step_ms_p50, step_ms_p95: median and 95th percentile of the step time, in milliseconds.
        error: what is wrong.
    """

    env: str
    ok: bool
    reference: float | None = None
    empty: float | None = None
    garbage: float | None = None
    deterministic: bool | None = None
    step_ms_p50: float | None = None
    step_ms_p95: float | None = None
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields that `astuner env validate --json` prints."""
        names = ("env", "ok", "reference", "empty", "garbage", "deterministic", "step_ms_p50", "error")
        return {name: getattr(self, name) for name in names}


@contextlib.asynccontextmanager
async def service_client(
    env_types: Sequence[str], url: str | None, *, step_timeout: float = 60.0
) -> AsyncIterator[EnvServiceClient]:
    """Return a client for the service at `url`, or for a service that runs in this process meanwhile, without a port.

    Args:
        env_types: the environments of the service in this process, `FAMILY/NAME` or `package.module->Class`.
        url: the address of a running service, whose token is in ASTUNER_ENV_TOKEN; None for one in this process.
        step_timeout: the time limit of a reset, a step or an evaluation in this process, in seconds.

    Raises:
        ServiceError: the process that starts environments does not start.
    """
    if url is not None:
        client = EnvServiceClient(EnvServiceAddress(url, os.environ.get(TOKEN_VARIABLE, "")), retry_seconds=5.0)
        try:
            yield client
        finally:
            await asyncio.to_thread(client.close)
        return
    limits = ServiceLimits(step_timeout=step_timeout)
    table = InstanceTable({name: name for name in env_types}, (str(Path.cwd()),), limits)
    transport = httpx.ASGITransport(app=create_app(table, "", None))
    client = EnvServiceClient(EnvServiceAddress("http://localhost"), transport=transport)
    try:
        await asyncio.wrap_future(client.submit(table.start()))
        yield client
    finally:
        await asyncio.wrap_future(client.submit(table.close()))
        await asyncio.to_thread(client.close)


async def show_task(
    client: EnvServiceClient, env_type: str, params: Mapping[str, Any], split: str | None, task_id: str | None
) -> dict[str, Any]:
    """Return a task of an environment: its profile, the first observation, the tools and the reference.

    Args:
        client: the service that hosts the environment.
        split: the split; None for the first one.
        task_id: the task; None for the first one.

    Raises:
        EnvError: there is no such environment, split or task, or it fails.
    """
    source = EnvTask(env_type, split or "", params=params)
    info = await client.describe(source)
    source = replace(source, split=split if split is not None else next(iter(info.splits), ""))
    if task_id is None:
        listed = await asyncio.to_thread(client.tasks, source, count=1)
        if not listed:
            raise EnvError(f"split {source.split} of {env_type} has no task; its splits are {', '.join(info.splits)}")
        task_id = listed[0].task_id
    task = replace(source, task_id=task_id)
    reference = (await client.task(task, with_reference=True)).reference
    instance = await client.create(task, _SEED)
    await asyncio.wrap_future(instance.release())
    profile, observation = instance.profile, instance.observation
    return {
        "env": env_type,
        "split": task.split,
        "task": task_id,
        "splits": info.splits,
        "max_steps": profile.max_steps,
        "messages": list(profile.init_messages),
        "instruction": profile.main_query,
        "observation": observation.text,
        "legal_actions": list(observation.legal_actions),
        "tools": list(instance.tools),
        "metadata": dict(profile.metadata),
        "reference": None if reference is None else {"actions": list(reference.actions), "score": reference.score},
    }


async def validate_all(
    client: EnvServiceClient,
    env_types: Sequence[str],
    params: Mapping[str, Any],
    tasks: int,
    jobs: int,
    timeout: float,
) -> AsyncIterator[EnvValidation]:
    """Check environments of a service, and return the results in their order.

    Args:
        params: the keyword arguments of the environments.
        tasks: each split's number of tasks, from the first.
        jobs: the number of environments that are checked at a time.
        timeout: the time limit for an environment's checks, in seconds.
    """
    free = asyncio.Semaphore(jobs)

    async def checked(env_type: str) -> EnvValidation:
        checks = _Checks(client, EnvTask(env_type, "", params=params), tasks)
        async with free:
            try:
                async with asyncio.timeout(timeout):
                    await checks.run()
            except EnvError as error:
                checks.problems.append(str(error))
            except TimeoutError:
                checks.problems.append(f"the checks took longer than {timeout:g} s (--timeout)")
        return checks.result()

    running = [asyncio.create_task(checked(env_type)) for env_type in env_types]
    try:
        for task in running:
            yield await task
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


@dataclass
class _Episode:
    """What happened in an instance: the first observation, the results of the steps, and the score."""

    profile: TaskProfile
    observation: Observation
    steps: Sequence[StepResult]
    evaluation: Evaluation

    @property
    def score(self) -> float:
        """The score; with several agents, the score of the first agent to act."""
        score, agent = self.evaluation.score, self.observation.agent
        if isinstance(score, Mapping):
            return score[agent] if agent in score else min(score.values(), default=0.0)
        return score

    @property
    def is_success(self) -> bool:
        return self.score > 0 if self.evaluation.is_success is None else self.evaluation.is_success

    def seen(self) -> object:
        """Return everything that agents see and are rewarded for."""
        steps = [(step.observation, step.reward, step.is_done, step.is_valid) for step in self.steps]
        return self.profile.main_query, self.profile.init_messages, self.observation, steps, self.evaluation.score


@dataclass
class _Checks:
    client: EnvServiceClient
    source: EnvTask
    count: int
    problems: list[str] = field(default_factory=list)
    references: list[float] = field(default_factory=list)
    wrong: dict[str, list[float]] = field(default_factory=lambda: {"empty": [], "garbage": []})
    repeats: list[bool] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    async def run(self) -> None:
        info = await self.client.describe(self.source)
        checked = 0
        for split in info.splits:
            source = replace(self.source, split=split)
            profiles = await asyncio.to_thread(self.client.tasks, source, count=self.count, with_reference=True)
            for profile in profiles:
                task = replace(source, task_id=profile.task_id)
                await self._check_task(task, profile.reference, f"{split} task {shorten(profile.task_id)}")
                checked += 1
        if not checked:
            self.problems.append(f"the splits ({', '.join(info.splits) or 'none'}) have no task")

    def result(self) -> EnvValidation:
        times = sorted(1000 * second for second in self.seconds)
        error = "; ".join(dict.fromkeys(self.problems)) or None
        if error is not None and len(error) > _MAX_ERROR:
            error = f"{error[:_MAX_ERROR]}… ({len(self.problems)} problems)"
        return EnvValidation(
            self.source.env_type,
            not self.problems,
            min(self.references, default=None),
            max(self.wrong["empty"], default=None),
            max(self.wrong["garbage"], default=None),
            all(self.repeats) if self.repeats else None,
            round(statistics.median(times), 3) if times else None,
            round(times[int(0.95 * (len(times) - 1))], 3) if times else None,
            error,
        )

    async def _check_task(self, task: EnvTask, reference: Reference | None, name: str) -> None:
        actions = reference.actions if reference else None
        first = await self._play(task, actions)
        second = await self._play(task, actions)
        self.repeats.append(first.seen() == second.seen())
        if not self.repeats[-1]:
            self.problems.append(f"{name}: equal seeds and actions gave different observations or rewards")
        if reference is not None:
            self.references.append(first.score)
            if first.score < reference.score - _TOLERANCE:
                self.problems.append(
                    f"{name}: the reference {short_repr(list(reference.actions))} scores {first.score:g} instead of "
                    f"{reference.score:g}"
                )
            elif not first.is_success:
                self.problems.append(f"{name}: the reference scores {first.score:g}, but is_success is False")
        for kind, answer in (("empty", ""), ("garbage", GARBAGE)):
            if reference is not None and all(action == answer for action in reference.actions):
                continue  # the solution of some tasks is an empty text
            try:
                wrong = await self._play(task, [answer] * _WRONG_STEPS)
            except EnvError as error:
                self.problems.append(f"{name}: the {kind} answer failed: {error}")
                continue
            self.wrong[kind].append(wrong.score)
            if reference is not None and wrong.score >= reference.score - _TOLERANCE:
                self.problems.append(
                    f"{name}: the {kind} answer scores {wrong.score:g}, as much as the reference ({reference.score:g})"
                )
            elif reference is None and wrong.is_success:
                self.problems.append(f"{name}: the {kind} answer succeeds, with score {wrong.score:g}")

    async def _play(self, task: EnvTask, actions: Sequence[Action] | None) -> _Episode:
        """Play a task with the given actions; None stands for some of the legal ones."""
        instance = await self.client.create(task, _SEED)
        try:
            first = instance.observation
            for number in range(_WRONG_STEPS if actions is None else len(actions)):
                if instance.steps and instance.steps[-1].is_done:
                    break
                legal = instance.observation.legal_actions
                action: Action = actions[number] if actions is not None else legal[0] if legal else GARBAGE
                started = time.perf_counter()
                await instance.step(action)
                self.seconds.append(time.perf_counter() - started)
            episode = _Episode(instance.profile, first, instance.steps, await instance.evaluate())
        finally:
            await asyncio.wrap_future(instance.release())
        body = {"index": len(instance.steps), "action": ""}
        path = f"{instance_path(instance.instance_id)}/step"
        with contextlib.suppress(EnvError):
            await asyncio.wrap_future(self.client.submit(self.client.request("POST", path, body)))
            self.problems.append("a released instance accepted a step")
        return episode
