"""Records for the viewer, made with the model tuner and the run record of astuner."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from astuner.context_tracker.merge import build_samples
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.run_record.record import RunRecord
from astuner.run_record.updates import SampleUpdate
from astuner.schema import Episode, Judgement, LlmCall, Task
from astuner.task_rollout.statistics import tokens_of
from tests.scripted_engine import ScriptedEngine

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call><|im_end|>'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@dataclass(frozen=True)
class Agents:
    """Agents with scripted model answers."""

    tokenizer: Any

    def _tuner(self, episode_id: str, answers: Sequence[str]) -> ModelTuner:
        left = [self.tokenizer.encode(answer, add_special_tokens=False) for answer in answers]
        engine = ScriptedEngine(lambda prompt, params: left.pop(0), max_model_len=4096)
        return ModelTuner(engine, ChatCodec(self.tokenizer, "qwen3"), CallSettings(), episode_id=episode_id)

    def solve(self, episode_id: str, question: str, answer: str, forks: bool) -> tuple[LlmCall, ...]:
        """Calls of a solver with a tool. If it forks, it is called again with other tools, followed by a critic."""

        async def run(tuner: ModelTuner) -> None:
            first = await tuner.chat([user(question)], tools=TOOLS)
            result = {"role": "tool", "content": "3", "tool_call_id": first.parsed.tool_calls[0].id}
            history = [user(question), first.call.messages[-1], result]
            second = await tuner.chat(history, tools=TOOLS)
            if forks:
                await tuner.chat([*history, second.call.messages[-1], user("Are you sure?")])
                await tuner.chat([{"role": "system", "content": "You are a critic."}, user(f"Is {answer} right?")])

        thought = f"<think>\nIs it {answer}?\n</think>\n\n\\boxed{{{answer}}}<|im_end|>"
        tuner = self._tuner(episode_id, [CALL, thought, "Yes, I am.<|im_end|>", "It looks right.<|im_end|>"])
        asyncio.run(run(tuner))
        names = ["solver", "solver", "solver", "critic"]
        return tuple(
            replace(call, agent_name=name, policy_version=3, trained=name == "solver",
                    logprobs=tuple(-0.05 * (1 + place % 7) for place in range(len(call.completion_ids))))
            for call, name in zip(tuner.calls, names, strict=False)
        )  # fmt: skip


def an_episode(name: str, task: str, repeat: int, calls: tuple[LlmCall, ...], **fields: Any) -> Episode:
    values: dict[str, Any] = {"status": "ok", "reward": 1.0, "is_success": True, **fields}
    samples = tuple(build_samples(calls)) if values["status"] == "ok" else ()
    return Episode(
        name, Task(task, "What is 1 + 2?", metadata={"answer": "3"}), repeat, calls=calls, samples=samples,
        start_time=10.0, end_time=12.5 + repeat, **values,
    )  # fmt: skip


def updates_of(episode: Episode, advantage: float, *, by_call: bool) -> tuple[SampleUpdate, ...]:
    """Return updates of one mini-batch; with `by_call`, advantages halve from call to call."""
    updates = []
    for sample in episode.samples:
        trained = [place for place, mask in enumerate(sample.train_counts) if mask]
        share = {
            place: advantage / 2**number if by_call else advantage
            for number, span in enumerate(sample.spans)
            for place in range(span.start, span.end)
        }
        runs = tuple((1, share[place]) for place in trained)
        updates.append(
            SampleUpdate(
                runs,
                tuple(sample.logprobs[place] - 0.25 for place in trained),
                tuple(0.3 * (place % 9) for place in trained),
            )
        )
    return tuple(updates)


def step_metrics(step: int, lag: float = 0.0) -> dict[str, float]:
    """Return metrics of a run that learns."""
    done = 1 - math.exp(-(step + 1) / (12 + lag))
    wave = math.sin(step * 1.7) * 0.04
    return {
        "reward/mean": 0.2 + 0.75 * done + wave, "reward/min": 0.0, "reward/max": 1.0,
        "success/rate": 0.15 + 0.8 * done, "val/success_rate": 0.1 + 0.8 * done,
        "length/prompt": 60 + 9 * wave, "length/response": 20 - 6 * done, "length/sample": 80 + 9 * wave,
        "loss/total": 0.02 * (1 - done) + wave / 9, "kl/rollout": 0.001 + wave**2, "kl/update": 0.002 * done,
        "entropy": 0.9 - 0.6 * done, "clip_fraction": 0.05 * done, "episodes/calls": 2 + done, "grad_norm": 0.4 + wave,
        "tokens/raw": 9000 + 900 * wave, "tokens/distinct": 5000 + 400 * wave, "tokens/trained": 1500 - 300 * done,
        "time/rollout": 3 + wave, "time/update": 2 - wave, "time/step": 5.2,
    }  # fmt: skip


def write_step(
    record: RunRecord, agents: Agents, step: int, tasks: int = 2, repeats: int = 3, lag: float = 0.0
) -> None:
    """Write metrics and episodes of a step, including forks, a failure and wrong answers."""
    for task in range(tasks):
        for repeat in range(repeats):
            name, task_id = f"train-{step:06d}-sum/{task}-{repeat}", f"sum/{task}"
            fails = task == 1 and repeat == 0
            right = (step + task + repeat) % 3 != 0
            calls = agents.solve(name, "What is 1 + 2?", "3" if right else "4", forks=repeat == 1)
            episode = (
                an_episode(name, task_id, repeat, calls[:1], status="failed", reward=None, is_success=None,
                           error_kind="workflow", error="ValueError: the tool was not there",
                           error_traceback="Traceback (most recent call last):\n  in execute\nValueError: the tool",
                           process_effects=("recursion limit: 60",), ended_processes=("sleep 600 (71)",))
                if fails
                else an_episode(name, task_id, repeat, calls, reward=float(right), is_success=right,
                                judgement=Judgement(float(right), right, {"correct": float(right), "brief": 0.25},
                                                    explanation=f"the answer is {'right' if right else 'wrong'}"))
            )  # fmt: skip
            advantage = None if fails else 0.58 if right else -1.15
            updates = updates_of(episode, advantage or 0.0, by_call=repeat == 2)
            record.write_episode(step, "train", episode, advantage, tokens_of([episode]), updates)
    record.log_metrics(step, step_metrics(step, lag))


def open_record(folder: Path, model: str = "some/model", lr: str = "1.0e-6") -> RunRecord:
    config = f"astuner:\n  model:\n    path: {model}\n  trainer_common:\n    algorithm:\n      adv_estimator: grpo\n"
    config += f"    optim:\n      lr: {lr}\n"
    return RunRecord.open(folder, backbone="local", config_yaml=config, resume=False, loggers=())
