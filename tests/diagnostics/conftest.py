"""Evidence for the checks: ordinary inputs of a run and ordinary episodes, of which tests change a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from astuner.config.root import AstunerConfig
from astuner.context_tracker.merge import build_samples
from astuner.diagnostics.evidence import StartEvidence, StepEvidence, UpdateEvidence, model_facts, probe_template
from astuner.diagnostics.monitor import all_checks
from astuner.model_tuner.codec import ChatCodec
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, LlmCall, SamplingParams, Task, TaskSet

Found = list[tuple[str, str]]


def found(name: str, evidence: Any) -> Found:
    """Return the findings of a check."""
    (check,) = [check for check in all_checks() if check.name == name]
    return list(check.find(evidence))


def make_task(number: int, **metadata: Any) -> Task:
    return Task(f"t{number}", f"What is {number} + 1?", metadata={"answer": str(number + 1), **metadata})


class Evidence:
    """Makes evidence for one tokenizer and model."""

    def __init__(self, tokenizer: Any, model: Path) -> None:
        self.codec = ChatCodec(tokenizer, {"name": "default", "tool_parser": "qwen3"})
        self.model = str(model)

    def start(self, codec: ChatCodec | None = None, **changes: Any) -> StartEvidence:
        codec = codec or self.codec
        config = AstunerConfig.model_validate({"model": {"path": self.model}, **changes.pop("config", {})})
        tasks = TaskSet(tuple(make_task(n) for n in range(10)), tuple(make_task(n) for n in range(20, 24)))
        values = {
            "config": config,
            "tasks": tasks,
            "template": probe_template(codec),
            "model": model_facts(codec, self.model),
            "decode": codec.decode,
            **changes,
        }
        return StartEvidence(**values)

    def call(
        self,
        episode: str,
        messages: Sequence[dict[str, Any]],
        answer: str,
        *,
        number: int = 0,
        tools: Sequence[dict[str, Any]] = (),
        logprobs: Callable[[int], float] | None = None,
        **fields: Any,
    ) -> LlmCall:
        prompt = self.codec.render(messages, tools or None)
        ids = (*self.codec.tokenizer.encode(answer, add_special_tokens=False), self.codec.stop_token_ids[0])
        parsed = self.codec.parse(ids, prompt, tools or None)
        reply: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.tool_calls:
            reply["tool_calls"] = [
                {"id": c.id, "function": {"name": c.name, "arguments": str(dict(c.arguments))}}
                for c in parsed.tool_calls
            ]
        # As if sampled: different for each episode and token.
        value = logprobs or (lambda place: -0.01 - (crc32(f"{episode} {number} {place}".encode()) % 1000) / 1000)
        call = LlmCall(
            call_id=f"{episode}/{number}",
            episode_id=episode,
            prompt_ids=prompt,
            completion_ids=ids,
            logprobs=tuple(value(place) for place in range(len(ids))),
            finish_reason="stop",
            sampling=SamplingParams(seed=crc32(f"{episode} {number}".encode())),
            tools_hash="tools" if tools else "",
            messages=(*messages, reply),
        )
        return replace(call, **fields)

    def episode(
        self, task: Task, repeat: int, reward: float | None, answer: str | None = None, **fields: Any
    ) -> Episode:
        name = f"train-1-{task.task_id}-{repeat}"
        calls = fields.pop("calls", None)
        if calls is None:
            text = answer if answer is not None else f"It is {task.metadata['answer']}."
            calls = (self.call(name, [{"role": "user", "content": task.main_query}], text),)
        episode = Episode(
            episode_id=name,
            task=task,
            repeat_index=repeat,
            status="failed" if reward is None else "ok",
            reward=reward,
            is_success=None if reward is None else reward > 0,
            calls=calls,
            samples=tuple(build_samples(calls)) if reward is not None else (),
        )
        return replace(episode, **fields)

    def step(self, episodes: Sequence[Episode], **changes: Any) -> StepEvidence:
        start = changes.pop("start", None) or self.start()
        return StepEvidence(start, changes.pop("step", 1), tuple(episodes), **changes)

    def ordinary(self) -> list[Episode]:
        """Four tasks of four episodes, half of them right."""
        return [
            self.episode(make_task(n), repeat, float(repeat < 2), f"{n + 1 + 7 * (repeat >= 2)}{'!' * repeat}")
            for n in range(4)
            for repeat in range(4)
        ]

    def update(self, episodes: Sequence[Episode], **changes: Any) -> UpdateEvidence:
        """The result of an ordinary update: advantages by reward, and logprobs that differ by rounding."""
        step = self.step(episodes)
        advantages = {e.episode_id: (e.reward or 0.0) - 0.5 for e in episodes}
        samples = {
            e.episode_id: [
                SampleUpdate(
                    ((sum(map(bool, s.train_counts)), advantages[e.episode_id]),),
                    tuple(v + 1e-6 for v, count in zip(s.logprobs, s.train_counts, strict=True) if count),
                )
                for s in e.samples
            ]
            for e in episodes
        }
        values: dict[str, Any] = {
            "metrics": {"lr": 1e-6, "grad_norm": 0.1, "update/changed_weights": 1.0, "logprob_difference": 1e-6},
            "advantages": advantages,
            "samples": samples,
            "dtype": "float32",
            **changes,
        }
        return UpdateEvidence(step, **values)


@pytest.fixture(scope="session")
def evidence(tokenizer: Any, model_folder: Path) -> Evidence:
    return Evidence(tokenizer, model_folder)
