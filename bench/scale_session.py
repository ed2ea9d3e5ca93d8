"""The training session of bench_scale.py: episodes of many calls, without a model that samples or trains."""

from __future__ import annotations

import contextlib
import random
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from astuner.algorithms.credit_assignment import UpdateResult, shuffle_seed, step_advantages
from astuner.algorithms.registry import resolve
from astuner.algorithms.training_rows import TokenValues, mini_batches, row_scales, training_rows
from astuner.backbone.base import RunContext
from astuner.backbone.training.session import TrainingSession
from astuner.model_tuner.history import History, Prompt
from astuner.run_record.updates import count_trained_tokens
from astuner.schema import Completion, Episode, Message, Packed, SamplingParams, concatenate
from astuner.task_rollout.rollout import BatchRequest, OnEpisode
from astuner.task_runner.groups import with_samples

# Share of the new tokens of a call that the model has sampled; the others are observations.
SAMPLED = 0.25
# Letters per token: code, tables and JSON, which tools return, have 2 to 4.
LETTERS = 3
UPDATE_BYTES = "update/driver_bytes"


def random_floats(count: int) -> Packed[float]:
    """Return numbers of 4 bytes."""
    numbers = array("f", np.random.default_rng(count).random(count, np.float32).tobytes())
    return Packed([(numbers, 0, count)])


class SyntheticSession(TrainingSession):
    """Records random calls with the code that records those of agents, and makes their samples and their rows."""

    def __init__(self, context: RunContext, calls: int, tokens: int) -> None:
        self._context = context
        self._config = context.config.astuner
        self._calls, self._tokens = calls, tokens

    def roll_out(self, request: BatchRequest, on_episode: OnEpisode, on_attempt: OnEpisode) -> list[Episode]:
        episodes = []
        for task, repeat in request.episodes():
            name = f"{request.split}-{request.step:06d}-{task.task_id}-{repeat}"
            random_numbers = random.Random(name)
            episode = Episode(
                episode_id=name,
                task=task,
                repeat_index=repeat,
                status="ok",
                reward=random_numbers.random(),
                is_success=True,
                calls=tuple(self._record_calls(name, random_numbers)),
                start_time=1.0,
                end_time=2.0,
            )
            rollout = self._config.rollout
            episode = with_samples(episode, max_samples=rollout.multi_turn.max_sample_per_task, merge="leaf", seed=1)
            on_attempt(episode)
            on_episode(episode)
            episodes.append(episode)
        return episodes

    def _record_calls(self, name: str, random_numbers: random.Random) -> list[Any]:
        history = History(self._context.run_inputs.codec, episode_id=name)
        new = max(self._tokens // self._calls, 2)
        sampled = max(int(new * SAMPLED), 1)
        ids: Any = ()
        messages: list[Message] = []
        for _ in range(self._calls):
            observed = array("H", random_numbers.randbytes(2 * (new - sampled)))
            # Frameworks build the messages of each request anew.
            messages = [dict(message) for message in messages]
            messages.append({"role": "user", "content": "a" * len(observed) * LETTERS})
            completion = Completion(
                tuple(array("H", random_numbers.randbytes(2 * sampled))),
                tuple(-value / 2**16 for value in array("H", random_numbers.randbytes(2 * sampled))),
                "length",
            )
            answer = {"role": "assistant", "content": "b" * sampled * LETTERS}
            prompt = Prompt((*ids, *observed), messages, first_prompt_len=new - sampled)
            call = history.record(prompt, completion, answer, sampling=SamplingParams())
            ids = concatenate(call.prompt_ids, call.completion_ids)
            messages.append(answer)
        return history.calls

    def update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        advantages = step_advantages(self._config, resolve(self._config.trainer_common.algorithm), episodes, None)
        rows = advantages.assign_to(training_rows(episodes))
        for part in mini_batches(rows, advantages.groups, 1, shuffle_seed(self._config, step)):
            row_scales([rows[index] for index in part], "token-mean", self._config.data.max_response_length)
        values = {}
        for row in rows:
            numbers = random_floats(count_trained_tokens(episodes[row.episode].samples[row.sample]))
            values[row.episode, row.sample] = TokenValues(numbers, random_floats(len(numbers)))
        return advantages.update_result({}, rows, values)

    def sync(self, step: int) -> None:
        return

    def save(self, step: int, progress: dict[str, Any]) -> bool:
        return False

    def load(self) -> dict[str, Any] | None:
        return None

    def save_model(self, folder: Path, step: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)


class VerlDriverSession(SyntheticSession):
    """Prepares and sends the rows of an update as the main process of verl does. No worker takes them."""

    def update(self, episodes: Sequence[Episode], step: int) -> UpdateResult:
        import torch
        from driver import DriverTrainer, queue_replaced

        from astuner.backbone.verl.update import VerlUpdate

        algorithm = resolve(self._config.trainer_common.algorithm)
        trainer = DriverTrainer(count_trained_tokens(episodes[0].samples[0]))
        update = VerlUpdate(self._config, algorithm, trainer, torch.float32, 1, pad_token=0)
        update._check_logprob_gap = lambda *_: None  # type: ignore[method-assign]
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory is counted from now on
        with queue_replaced():
            result = update.step(episodes, step)
        return replace(result, metrics={**result.metrics, UPDATE_BYTES: resident_bytes("VmHWM") - before})


def resident_bytes(name: str) -> int:
    """Return the current (`VmRSS`) or the largest (`VmHWM`) resident memory of this process."""
    (kilobytes,) = re.findall(rf"^{name}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(kilobytes)


_SESSIONS = {"synthetic": SyntheticSession, "verl": VerlDriverSession}


@contextlib.contextmanager
def synthetic_session(context: RunContext, workload: str, calls: int, tokens: int) -> Iterator[SyntheticSession]:
    """Yield the session of a workload, in place of that of the local backbone."""
    yield _SESSIONS[workload](context, calls, tokens)
