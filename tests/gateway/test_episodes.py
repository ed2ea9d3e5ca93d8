"""Workflows that know the model only by its address: their episodes, errors and frozen models."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import openai
import orjson
import pytest
from openai import AsyncOpenAI, OpenAI

from astuner.config.data import TaskJudgeConfig
from astuner.errors import ModelError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Completion, Episode, SamplingParams, Task, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout.active_episodes import current_episode
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from astuner.workflow import Workflow
from tests.scripted_engine import ScriptedEngine

HI: list[Any] = [{"role": "user", "content": "hi"}]


class Asks(Workflow):
    """Asks the model twice, as a synchronous program."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        base_url, api_key = model_tuner.as_oai_baseurl_apikey(agent_name="solver")
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            await self.talk(client)
        return WorkflowOutput(reward=1.0)

    async def talk(self, client: OpenAI) -> None:
        messages = list(HI)
        for _ in range(2):
            answer = client.chat.completions.create(model="astuner", messages=messages)
            messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "and?"}]


class TooLong(Asks):
    async def talk(self, client: OpenAI) -> None:
        client.chat.completions.create(model="astuner", messages=[{"role": "user", "content": "hi " * 500}])


class WrongParameter(Asks):
    async def talk(self, client: OpenAI) -> None:
        client.chat.completions.create(model="astuner", messages=HI, logit_bias={"3": 1})


class OwnError(Asks):
    async def talk(self, client: OpenAI) -> None:
        with contextlib.suppress(openai.BadRequestError):
            client.chat.completions.create(model="astuner", messages=[{"role": "user", "content": "hi " * 500}])
        raise KeyError("mine")


class CatchesEverything(Asks):
    async def talk(self, client: OpenAI) -> None:
        for _ in range(2000):
            with contextlib.suppress(openai.OpenAIError):
                client.chat.completions.create(model="astuner", messages=HI)
            await asyncio.sleep(0)


class GivesUp(Asks):
    """Handles the errors of the model, and returns a reward."""

    async def talk(self, client: OpenAI) -> None:
        with contextlib.suppress(openai.OpenAIError):
            for _ in range(10):
                client.chat.completions.create(model="astuner", messages=HI)


class BlocksAndCatches(Asks):
    """Awaits nothing, so that it cannot be cancelled."""

    async def talk(self, client: OpenAI) -> None:
        for _ in range(80):
            with contextlib.suppress(openai.OpenAIError):
                client.chat.completions.create(model="astuner", messages=HI)


class CatchesAndReturnsNoReward(Asks):
    """Blocks its thread, so that it returns before it can be cancelled."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        base_url, api_key = model_tuner.as_oai_baseurl_apikey()
        with OpenAI(base_url=base_url, api_key=api_key) as client:
            for _ in range(8):
                with contextlib.suppress(openai.BadRequestError):
                    client.chat.completions.create(model="astuner", messages=HI)
        return WorkflowOutput()


class SlowJudge(BaseJudge):
    async def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        await asyncio.sleep(0.1)
        return 0.25, False


class LeavesACallBehind(Asks):
    async def talk(self, client: OpenAI) -> None:
        await super().talk(client)
        thread = threading.Thread(target=self.late, args=(client,), daemon=True)
        thread.start()
        while BrokenOrSlow.late == 0:
            await asyncio.sleep(0.01)

    def late(self, client: OpenAI) -> None:
        with contextlib.suppress(openai.OpenAIError, RuntimeError):  # the client is closed before its retry
            client.chat.completions.create(model="astuner", messages=[{"role": "user", "content": "late"}])


class BrokenOrSlow(ScriptedEngine):
    """Answers two calls; the third fails or never ends."""

    late = 0
    fails = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> Completion:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > 2:
            type(self).late += 1
            if self.fails:
                raise ModelError("the engine is broken")
            await asyncio.Event().wait()
        return await super().generate(prompt_ids, params, **options)


class Broken(BrokenOrSlow):
    fails = True


def run(
    tokenizer: Any,
    workflow: type[Workflow],
    answer: str = "three<|im_end|>",
    engine: type[ScriptedEngine] = ScriptedEngine,
    settings: dict[str, Any] | None = None,
    **changes: Any,
) -> Episode:
    ids = tokenizer.encode(answer, add_special_tokens=False)
    scripted = engine(lambda prompt, params: ids, max_model_len=4096)
    call_settings = CallSettings(max_tokens=2000, **(settings or {}))
    options = {"judge": None, "episode_timeout": 30.0, **changes}
    runner = TaskRunner(workflow, engine=scripted, codec=ChatCodec(tokenizer, "qwen3"), **options)
    rollout = TaskRollout(EpisodesHere(runner))
    try:
        (episode,) = rollout.run(BatchRequest([Task("t", "hi")], 1, "train", 0, 0, call_settings))
    finally:
        rollout.close()
    return episode


def test_an_episode_of_a_program_that_has_only_the_address(tokenizer: Any):
    episode = run(tokenizer, Asks)
    assert (episode.status, episode.reward) == ("ok", 1.0)
    first, second = episode.calls
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids
    assert second.fork is None
    assert len(episode.samples) == 1
    assert sum(episode.samples[0].train_counts) == len(first.completion_ids) + len(second.completion_ids)


@pytest.mark.parametrize(
    ("workflow", "kind", "says"),
    [
        (TooLong, "context_length", "data.max_prompt_length is 100"),
        (WrongParameter, "unsupported_parameter", "logit_bias"),
        (OwnError, "workflow", "KeyError: 'mine'"),
    ],
)
def test_an_error_of_the_model_is_the_error_of_the_episode(
    tokenizer: Any, workflow: type[Workflow], kind: str, says: str
):
    episode = run(tokenizer, workflow, settings={"max_prompt_length": 100})
    assert (episode.status, episode.error_kind) == ("failed", kind)
    assert says in str(episode.error)


def test_a_workflow_that_catches_the_call_limit_forever_is_ended(tokenizer: Any):
    episode = run(tokenizer, CatchesEverything, settings={"max_calls": 3}, on_max_steps="fail")
    assert (episode.status, episode.error_kind) == ("failed", "max_steps")
    assert len(episode.calls) == 3


def test_a_workflow_that_cannot_be_cancelled_gets_an_error_for_each_call_beyond_the_limit(tokenizer: Any):
    episode = run(tokenizer, BlocksAndCatches, settings={"max_calls": 3})
    assert (episode.status, episode.reward, episode.error_kind) == ("ok", 1.0, "max_steps"), episode.error
    assert len(episode.calls) == 3


def test_a_workflow_may_return_what_it_has_at_the_call_limit(tokenizer: Any):
    episode = run(tokenizer, GivesUp, settings={"max_calls": 3})
    assert (episode.status, episode.reward, episode.error_kind) == ("ok", 1.0, "max_steps")
    assert len(episode.calls) == 3
    failed = run(tokenizer, GivesUp, settings={"max_calls": 3}, on_max_steps="fail")
    assert (failed.status, failed.error_kind) == ("failed", "max_steps")


def test_the_judge_of_a_workflow_that_should_have_been_ended_is_not_cancelled(tokenizer: Any):
    judge = SlowJudge(TaskJudgeConfig())
    episode = run(tokenizer, CatchesAndReturnsNoReward, settings={"max_calls": 2}, judge=judge)
    assert (episode.status, episode.reward, episode.error_kind) == ("ok", 0.25, "max_steps"), episode.error
    assert len(episode.calls) == 2


class NotesTheEpisode(ScriptedEngine):
    seen: ClassVar[set[str | None]] = set()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        self.seen.add(current_episode())
        return await super().generate(prompt_ids, params)


class AsksBothWays(Asks):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        await model_tuner.chat(HI)
        return await super().execute(workflow_task, model_tuner)


def test_an_engine_sees_which_episode_a_call_is_from(tokenizer: Any):
    NotesTheEpisode.seen.clear()
    run(tokenizer, AsksBothWays, engine=NotesTheEpisode)
    assert len(NotesTheEpisode.seen) == 1
    assert None not in NotesTheEpisode.seen


def test_degenerate_output_ends_the_episode_with_its_reward(tokenizer: Any):
    settings = {"madness_checklist": ("nonsense",)}
    for workflow in (Asks, GivesUp, CatchesEverything):
        episode = run(tokenizer, workflow, "ha " * 600 + "<|im_end|>", settings=settings, madness_reward=-0.5)
        assert (episode.status, episode.reward) == ("ok", -0.5)
        assert len(episode.calls) == 1


@pytest.mark.parametrize("workflow", [GivesUp, CatchesEverything])
def test_a_broken_engine_fails_the_episode_although_the_agent_handles_the_error(
    tokenizer: Any, workflow: type[Workflow]
):
    episode = run(tokenizer, workflow, engine=Broken)
    assert episode.status == "failed"
    assert "the engine is broken" in str(episode.error)


def test_a_call_that_the_workflow_leaves_behind_is_cut(tokenizer: Any):
    BrokenOrSlow.late = 0
    episode = run(tokenizer, LeavesACallBehind, engine=BrokenOrSlow)
    assert episode.status == "ok"
    assert [(call.cut, call.trained) for call in episode.calls] == [(False, True), (False, True), (True, False)]
    assert sum(sum(sample.train_counts) for sample in episode.samples) == sum(
        len(call.completion_ids) for call in episode.calls
    )


class _Endpoint(BaseHTTPRequestHandler):
    """An OpenAI-compatible endpoint that answers with the name of the model that it was asked for."""

    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = orjson.loads(self.rfile.read(int(self.headers["content-length"])))
        message = {"role": "assistant", "content": f"I am {body['model']} at temperature {body.get('temperature')}"}
        choice = {"index": 0, "message": message, "finish_reason": "length"}
        usage = {"prompt_tokens": 11, "completion_tokens": 7, "total_tokens": 18}
        content = orjson.dumps(
            {"id": "1", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage}
        )
        self.bodies.append(body)
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_args: Any) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Endpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    thread.join()
    server.server_close()


class AsksTwoModels(Workflow):
    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        base_url, api_key = model_tuner.as_oai_baseurl_apikey()
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            assert [model.id async for model in client.models.list()] == ["astuner", "helper"]
            for model in ("astuner", "helper"):
                answer = await client.chat.completions.create(model=model, messages=HI, temperature=1.0)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (11, 7)
            with contextlib.suppress(openai.NotFoundError):
                await client.chat.completions.create(model="gpt-4o", messages=HI)
        return WorkflowOutput(reward=1.0)


def test_calls_of_another_model_are_forwarded_if_it_is_configured(tokenizer: Any, endpoint: str):
    _Endpoint.bodies.clear()
    targets = Targets(("default",), {"helper": FrozenModel("helper-7b", endpoint, "none")})
    episode = run(tokenizer, AsksTwoModels, targets=targets)
    assert episode.status == "ok", episode.error
    own, forwarded = episode.calls
    # OpenAI's API refuses some parameters without tools or logprobs, so only those of the client are forwarded.
    assert _Endpoint.bodies == [{"model": "helper-7b", "messages": HI, "temperature": 1.0}]
    assert (own.target_tag, own.trained) == ("default", True)
    assert (forwarded.target_tag, forwarded.trained, forwarded.completion_ids) == ("helper", False, ())
    assert forwarded.messages[-1]["content"] == "I am helper-7b at temperature 1.0"
    assert sum(episode.samples[0].train_counts) == len(own.completion_ids)


class AsksAHelperFromACritic(Workflow):
    """Names the forwarded model with clients of an agent that has a debug model."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        async def debug_model(*_args: Any, **_options: Any) -> None:
            raise AssertionError("the debug model of the critic was called")

        agent = ("critic", "critic", debug_model)
        base_url, api_key = model_tuner.as_oai_baseurl_apikey(*agent)
        async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
            for one in (client, model_tuner.as_raw_openai_sdk_client(*agent)):
                await one.chat.completions.create(model="helper", messages=HI)
        await model_tuner.chat(HI)
        return WorkflowOutput(reward=1.0)


def test_a_forwarded_model_is_not_the_debug_model_of_the_agent(tokenizer: Any, endpoint: str):
    targets = Targets(("default",), {"helper": FrozenModel("helper-7b", endpoint, "none")})
    episode = run(tokenizer, AsksAHelperFromACritic, targets=targets)
    assert episode.status == "ok", episode.error
    answers = [call.messages[-1]["content"] for call in episode.calls[:2]]
    assert answers == ["I am helper-7b at temperature None"] * 2
