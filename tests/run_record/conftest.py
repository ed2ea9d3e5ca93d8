"""Fixtures: episodes, a reader of TensorBoard files, and a folder without write permission."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from astuner.schema import CallSpan, Episode, LlmCall, Sample, Task

MakeEpisode = Callable[..., Episode]


@pytest.fixture
def make_episode() -> MakeEpisode:
    """Return a function that makes an episode of an agent that calls tools. Each call extends the previous call."""

    def make(episode_id: str = "e1", task_id: str = "t1", calls: int = 2, tokens: int = 5, **fields: Any) -> Episode:
        prompt: tuple[int, ...] = tuple(range(100, 110))
        messages: tuple[dict[str, Any], ...] = ({"role": "user", "content": "What is 6 × 7?"},)
        mask, logprobs, made, spans = [0] * len(prompt), [0.0] * len(prompt), [], []
        for number in range(calls):
            answer = tuple(1000 * number + index for index in range(tokens))
            chances = tuple(-0.1 * (index + 1) / (number + 1) for index in range(tokens))
            messages = (*messages, {"role": "assistant", "content": f"Answer {number}"})
            call = LlmCall(f"c{number}", episode_id, prompt, answer, chances, "stop", messages=messages, start_time=1.5)
            made.append(call)
            spans.append(CallSpan(call.call_id, len(prompt), len(prompt) + tokens))
            prompt = (*prompt, *answer, 7, 8, 9)
            mask += [1] * tokens + [0] * 3
            logprobs += [*chances, 0.0, 0.0, 0.0]
            messages = (*messages, {"role": "tool", "content": f"Result {number}", "tool_call_id": f"x{number}"})
        sample = Sample(prompt, tuple(mask), tuple(logprobs), tuple(range(len(prompt))), 1.0, tuple(spans), episode_id)
        values: dict[str, Any] = {"repeat_index": 0, "status": "ok", "reward": 1.0, "is_success": True, **fields}
        task = Task(task_id, "What is 6 × 7?", metadata={"answer": "42"})
        return Episode(episode_id, task, calls=tuple(made), samples=(sample,), start_time=1.0, end_time=3.5, **values)

    return make


@pytest.fixture
def tensorboard_events() -> Callable[[Path], dict[str, list[tuple[int, float]]]]:
    """Return a function that reads a run's scalars with TensorBoard's reader: (step, value) by name."""

    def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        accumulator = EventAccumulator(str(folder / "tensorboard"))
        accumulator.Reload()
        return {
            tag: [(event.step, event.value) for event in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }

    return read


@pytest.fixture
def without_rights() -> Callable[[], AbstractContextManager[None]]:
    """Return a context in which this process cannot write to folders of root."""

    @contextmanager
    def context() -> Iterator[None]:
        if os.geteuid() != 0:
            yield
            return
        os.seteuid(65534)
        try:
            yield
        finally:
            os.seteuid(0)

    return context
