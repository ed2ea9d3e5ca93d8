"""Records with known rewards, written with the run record's own writer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from astuner.algorithms.advantages import group_relative_advantages
from astuner.context_tracker.merge import build_samples
from astuner.run_record.record import RunRecord
from astuner.run_record.updates import SampleUpdate, count_trained_tokens
from astuner.schema import Episode, LlmCall, Split, Task
from astuner.task_rollout.statistics import tokens_of

CONFIG = "astuner:\n  backbone: local\n  trainer_common:\n    algorithm:\n      adv_estimator: {}\n"


def an_episode(
    step: int, task: str, repeat: int, answer: str, reward: float | None, *, tokens: int = 12, **fields: Any
) -> Episode:
    """Return an episode with two calls of agents `solver` and `critic`, whose workflow output is `answer`."""
    name = f"{step}-{task}-{repeat}"
    question = {"role": "user", "content": f"What is {task}?"}
    calls, prompt, messages = [], tuple(range(tokens)), [question]
    for number, agent in enumerate(("solver", "critic")):
        completion = tuple(range(100 * number, 100 * number + tokens))
        messages = [*messages, {"role": "assistant", "content": f"{agent} says {answer}"}]
        calls.append(LlmCall(f"{name}/{number}", name, prompt, completion, (-0.5,) * tokens, "stop",
                             agent_name=agent, messages=tuple(messages), start_time=1.0, end_time=2.0))  # fmt: skip
        prompt += completion
    values: dict[str, Any] = {
        "status": "ok", "is_success": None if reward is None else reward > 0,
        "metadata": {"final_answer": answer}, "start_time": 1.0, "end_time": 3.0, **fields,
    }  # fmt: skip
    episode = Episode(
        name, Task(task, f"What is {task}?", metadata={"answer": task}), repeat, reward=reward, calls=tuple(calls),
        **values,
    )  # fmt: skip
    return replace(episode, samples=tuple(build_samples(calls)) if episode.status == "ok" else ())


def write_run(
    folder: Path,
    steps: Mapping[int, Sequence[Episode]],
    *,
    algorithm: str = "grpo",
    split: Split = "train",
    backbone: str = "local",
    config: str | None = None,
    finish: Callable[[RunRecord], None] = lambda record: None,
) -> Path:
    """Write a run with the advantages of GRPO for its training episodes."""
    text = CONFIG.format(algorithm) if config is None else config
    with RunRecord.open(folder, backbone=backbone, config_yaml=text, resume=False, loggers=()) as record:
        for step, episodes in steps.items():
            advantages = _advantages(episodes) if split == "train" and backbone != "debug" else {}
            for episode in episodes:
                advantage = advantages.get(episode.episode_id)
                updates = [
                    SampleUpdate(((count_trained_tokens(sample), advantage),), None)
                    for sample in episode.samples
                    if advantage is not None
                ]
                record.write_episode(step, split, episode, advantage, tokens_of([episode]), updates)
        finish(record)
    return folder


def _advantages(episodes: Sequence[Episode]) -> dict[str, float]:
    scored = [episode for episode in episodes if episode.status == "ok"]
    groups = {task: number for number, task in enumerate({episode.task.task_id for episode in scored})}
    values = group_relative_advantages(
        torch.tensor([episode.reward for episode in scored]),
        torch.tensor([groups[episode.task.task_id] for episode in scored]),
        True,
    )
    return {episode.episode_id: value for episode, value in zip(scored, values.tolist(), strict=True)}


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
