"""Advantages from a teacher, its loading, and its prompts, which may have a hint at the end of the request.

The loss of on-policy distillation is the reverse KL divergence from the model π to the teacher, on text that the model
has sampled (Agarwal et al., 2023, arXiv:2306.13649; Gu et al., 2023, arXiv:2306.08543). Its estimate at a sampled
token is log π - log teacher. The negative estimate is an advantage for that token, so every algorithm with a
loss of tokens can train on it ("On-Policy Distillation", Thinking Machines Lab, 2025). The mean over the tokens of
the step is subtracted as a baseline (Williams, 1992), which reduces the variance of the gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch
from loguru import logger
from numpy.typing import NDArray

from astuner.algorithms.distillation.teachers import ModelTeacher, ServerTeacher, Teacher, TeacherSequence
from astuner.algorithms.kl import LOG_RATIO_LIMIT
from astuner.algorithms.training_rows import TrainingRow
from astuner.config.algorithm_settings import SELF, TEACHER_KEY, DistillationConfig, is_server
from astuner.config.root import AstunerConfig
from astuner.config.services import api_key
from astuner.errors import ConfigError, ModelError, short_repr
from astuner.llm_engine.causal_lm import compute_dtype, load_causal_lm
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.schema import Episode, LlmCall, Task, TaskSet
from astuner.system.clock import timestamp


class RowTeacher(Protocol):
    """Adds a teacher's advantages to training rows."""

    def assign_to(
        self, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Return the rows with the teacher's advantages, and metrics; see `Distiller.assign_to`."""
        ...


@dataclass(frozen=True)
class Distiller:
    """Adds the teacher's advantages to training rows.

    Attributes:
        config: the section `trainer_common.distillation`.
        codec: converts messages to token ids, for hints.
    """

    config: DistillationConfig
    teacher: Teacher
    codec: ChatCodec

    def assign_to(
        self, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Return the rows with the teacher's advantages: coef × (d - mean of d), where d is log teacher - log π.

        d is computed for each trained token and clipped to ± `LOG_RATIO_LIMIT`; the mean is over those of all rows.

        Args:
            rows: the rows to train, which need the logprobs of the sampler.

        Returns:
            The rows, and the metrics: `distillation/kl` is the mean of log π - log teacher over the trained tokens,
            in nats; `distillation/calls_without_hint` is the number of calls whose prompt cannot have the hint, which
            the teacher does not score.

        Raises:
            ModelError: the teacher cannot score the rows.
            ConfigError: the hint has a field that a task does not have.
        """
        started = timestamp()
        if self.config.hint is not None:
            scored, without_hint = self._score_with_hint(self.config.hint, rows, episodes)
        else:
            sequences = [TeacherSequence(row.token_ids, row.calls, row.temperatures) for row in rows]
            scored = [(values, np.ones(len(values), bool)) for values in self.teacher.logprobs(sequences)]
        differences, trained = [], []
        for row, (logprobs, is_scored) in zip(rows, scored, strict=True):
            student = np.asarray(row.old_logprobs if len(row.old_logprobs) else row.logprobs, np.float32)
            differences.append(np.clip(logprobs - student, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
            trained.append(is_scored & (np.asarray(row.train_counts) > 0))
        values = [difference[is_trained] for difference, is_trained in zip(differences, trained, strict=True)]
        mean = float(np.concatenate(values).mean()) if any(map(len, values)) else 0.0
        result = [
            replace(row, teacher_advantages=np.where(kept, self.config.coef * (each - mean), 0.0).astype(np.float32))
            for row, each, kept in zip(rows, differences, trained, strict=True)
        ]
        metrics = {"distillation/kl": -mean}
        if self.config.hint is not None:
            metrics["distillation/calls_without_hint"] = float(without_hint)
            if without_hint:
                logger.warning(
                    "the teacher did not score {} calls, because the hint does not fit at the end of their last "
                    "message (it is an answer, or has no text)",
                    without_hint,
                )
        return result, metrics | {"time/teacher": timestamp() - started}

    def close(self) -> None:
        """Free the teacher's resources."""
        self.teacher.close()

    def _score_with_hint(
        self, hint: str, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[tuple[NDArray[np.float32], NDArray[np.bool_]]], int]:
        """Score each call with its own prompt, because a hint at the end of one call would be context for the next.

        Returns:
            The teacher's logprobs [N] for each row, and which of them exist; the number of calls that were skipped.
        """
        sequences, places = [], []
        scored = [(np.zeros(len(row.token_ids), np.float32), np.zeros(len(row.token_ids), bool)) for row in rows]
        skipped = 0
        for number, row in enumerate(rows):
            episode = episodes[row.episode]
            text = hint_text(hint, episode)
            by_id = {call.call_id: call for call in episode.calls}
            calls = [by_id[call_id] for call_id in row.call_ids]
            for call, (start, end), temperature in zip(calls, row.calls, row.temperatures, strict=True):
                prompt = prompt_with_hint(self.codec, call, text)
                if prompt is None:
                    skipped += 1
                    continue
                answer = [int(token) for token in row.token_ids[start:end]]
                span = (len(prompt), len(prompt) + len(answer))
                sequences.append(TeacherSequence((*prompt, *answer), [span], [temperature]))
                places.append((number, start, end))
        for (number, start, end), values in zip(places, self.teacher.logprobs(sequences), strict=True):
            logprobs, is_scored = scored[number]
            logprobs[start:end] = values[len(values) - (end - start) :]
            is_scored[start:end] = True
        return scored, skipped


def load_distiller(
    config: AstunerConfig,
    codec: ChatCodec,
    tasks: TaskSet | None,
    *,
    teacher_path: str | None,
    device: torch.device,
    policy: Teacher | None = None,
) -> Distiller | None:
    """Return the distiller of a run, or None if it has no teacher.

    Args:
        codec: the codec of the model in training.
        tasks: the tasks of the run; the first one shows which fields a hint can have. None if they were checked.
        teacher_path: the folder of the teacher, if it is one.
        policy: the model in training, for the teacher `self`.

    Raises:
        ConfigError: the hint has a field that the tasks do not have, or the variable of the API key is not set.
        ModelError: the teacher cannot be loaded or reached, or has another tokenizer.
    """
    settings = config.trainer_common.distillation
    if settings.teacher is None:
        return None
    if settings.hint is not None and tasks is not None and tasks.training:
        check_hint(settings.hint, tasks.training[0])
    max_tokens = config.trainer_common.max_tokens_per_micro_batch
    teacher: Teacher
    if settings.teacher == SELF:
        assert policy is not None
        teacher = policy
    elif is_server(settings.teacher):
        teacher = ServerTeacher.connect(
            settings.teacher,
            model=settings.teacher_model,
            api_key=api_key("trainer_common.distillation.api_key_env", settings.api_key_env),
            timeout=settings.request_timeout,
        )
    else:
        assert teacher_path is not None
        _check_tokenizer(codec, teacher_path)
        model = load_causal_lm(teacher_path, compute_dtype(config.model.dtype, device))
        teacher = ModelTeacher(model.to(device).eval().requires_grad_(False), max_tokens)
    return Distiller(settings, teacher, codec)


def _check_tokenizer(codec: ChatCodec, path: str) -> None:
    """Check that a teacher has the token ids of the model in training."""
    model_ids, teacher_ids = codec.tokenizer.get_vocab(), load_tokenizer(path, TEACHER_KEY).get_vocab()
    different = sorted(
        token for token in model_ids.keys() | teacher_ids.keys() if model_ids.get(token) != teacher_ids.get(token)
    )
    if different:
        token = different[0]
        teacher_id, model_id = (ids.get(token, "no id") for ids in (teacher_ids, model_ids))
        raise ModelError(
            f"trainer_common.distillation.teacher {path!r} has another tokenizer than model.path: the ids of "
            f"{len(different)} of {len(model_ids)} tokens differ, for example that of {short_repr(token)}: "
            f"{teacher_id} instead of {model_id}; name a teacher of the same model family"
        )


def check_hint(hint: str, task: Task) -> None:
    """Check that the fields of a hint exist.

    Raises:
        ConfigError: the task has no such field, or the braces of the hint do not match.
    """
    _filled(hint, _task_fields(task) | {"reward": 0.0, "explanation": ""}, task.task_id)


def hint_text(hint: str, episode: Episode) -> str:
    """Return the hint with the values of an episode.

    Raises:
        ConfigError: the episode's task has no such field.
    """
    judgement = episode.judgement
    outcome = {"reward": episode.reward, "explanation": judgement.explanation if judgement else ""}
    return _filled(hint, _task_fields(episode.task) | outcome, episode.task.task_id)


def prompt_with_hint(codec: ChatCodec, call: LlmCall, text: str) -> tuple[int, ...] | None:
    """Return a call's prompt ids with a text at the end of its last message.

    The tools of a call are not recorded, so the prompt is not rendered again. The request is rendered without tools,
    with and without the text, and the part that differs is exchanged at the end of the recorded prompt.

    Returns:
        The ids; None if the last message is an answer or has no text, or if the recorded prompt ends in another way.
    """
    # The last message is the answer; `messages` may be empty if the workflow did not use chat messages.
    request = list(call.messages[:-1])
    if not request or request[-1].get("role") == "assistant" or not isinstance(request[-1].get("content"), str):
        return None
    hinted = [*request[:-1], {**request[-1], "content": f"{request[-1]['content']}\n\n{text}"}]
    before, after = codec.render(request, None), codec.render(hinted, None)
    common = next((index for index, pair in enumerate(zip(before, after, strict=False)) if pair[0] != pair[1]), 0)
    replaced, tail = before[common:], after[common:]
    if not replaced or call.prompt_ids[-len(replaced) :] != replaced:
        return None
    return (*call.prompt_ids[: -len(replaced)], *tail)


def _task_fields(task: Task) -> dict[str, Any]:
    return {**task.metadata, "task_id": task.task_id, "main_query": task.main_query}


def _filled(hint: str, fields: Mapping[str, Any], task_id: str) -> str:
    try:
        return hint.format_map(fields)
    except KeyError as error:
        raise ConfigError(
            f"trainer_common.distillation.hint has the field {error.args[0]!r}, which task {task_id} lacks; its "
            f"fields: {', '.join(sorted(map(str, fields)))}"
        ) from error
    except (ValueError, IndexError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"trainer_common.distillation.hint {hint!r} cannot be filled in: {error}; write a field as {{answer}}, and "
            "a brace as {{ or }}"
        ) from error
