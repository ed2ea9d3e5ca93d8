"""A gateway with scripted models, and the official clients."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from astuner.gateway.http_server import Gateway
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Completion, SamplingParams
from tests.scripted_engine import ScriptedEngine

MakeTuner = Callable[..., ModelTuner]


class SlowEngine(ScriptedEngine):
    """A scripted engine that answers when `release` is called, and counts its requests."""

    def __init__(self, answer: Callable[[Sequence[int], SamplingParams], Sequence[int]], max_model_len: int) -> None:
        super().__init__(answer, max_model_len)
        self.started = 0
        self.cancelled = 0
        self.is_released = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **options: Any) -> Completion:
        self.started += 1
        try:
            while not self.is_released:
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await super().generate(prompt_ids, params, **options)


@pytest.fixture(scope="session")
def codec(tokenizer: Any) -> ChatCodec:
    return ChatCodec(tokenizer, "qwen3")


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    gateway = Gateway()
    yield gateway
    gateway.close()


@pytest.fixture
def make_tuner(codec: ChatCodec, gateway: Gateway) -> MakeTuner:
    """Return a function that makes a tuner whose model gives answers, one per call."""

    def make(
        answers: Sequence[str] = ("hi<|im_end|>",),
        engine: type[ScriptedEngine] = ScriptedEngine,
        episode_id: str = "e",
        endpoints: Gateway = gateway,
        targets: Any = None,
        **settings: Any,
    ) -> ModelTuner:
        left = [codec.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        scripted = engine(lambda prompt, params: left.pop(0), 4096)
        tuner = ModelTuner(
            scripted,
            codec,
            CallSettings(**{"max_model_len": 4096, "max_response_length": 4096, **settings}),
            episode_id=episode_id,
            endpoints=endpoints,
            targets=targets,
        )
        tuner.engine = scripted  # type: ignore[attr-defined]
        return tuner

    return make
