"""Prompts that only the teacher sees: the calls' prompts, with a hint at the end of the request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from astuner.errors import ConfigError
from astuner.model_tuner import ChatCodec
from astuner.schema import Episode, LlmCall, Task


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


def find_calls(episode: Episode, call_ids: Sequence[str]) -> list[LlmCall]:
    """Return the calls of an episode with the given ids, in their order."""
    by_id = {call.call_id: call for call in episode.calls}
    return [by_id[call_id] for call_id in call_ids]
