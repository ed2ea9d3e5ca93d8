"""An episode's expected answer, agent's answer and judge, for the top of its page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astuner.run_record.answers import last_text, without_blocks
from astuner.schema import Episode

_PARAMS = "astuner.task_judge.params."
# Fields of a task's metadata that hold the expected answer, besides those that the parameters of the judge name.
_EXPECTED = ("answer", "target", "solution", "ground_truth", "reference")


def verdict_view(episode: Episode, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the expected answer, the agent's answer, and the judge with its parameters.

    Args:
        episode: The episode.
        config: The run's configuration as dotted keys and values.

    Returns:
        `expected`, fields of the task's metadata; `answer` and `answer_source`, the field of the workflow's metadata
        that holds it or `last message`; `judge`, the class or the type of the judge; and `judge_params`.
    """
    params = {key.removeprefix(_PARAMS): value for key, value in config.items() if key.startswith(_PARAMS)}
    named = [value for key, value in params.items() if key.endswith("_field") and key != "answer_field"]
    metadata = episode.task.metadata
    fields = [
        name
        for name in dict.fromkeys([*named, *_EXPECTED])
        if isinstance(name, str) and metadata.get(name) not in (None, "")
    ]
    answer_field = params.get("answer_field", "final_answer")
    answer = episode.metadata.get(answer_field) if isinstance(answer_field, str) else None
    has_answer = answer not in (None, "")
    if isinstance(answer, str):
        answer = without_blocks(answer)
    kind = config.get("astuner.task_judge.judge_type")
    return {
        "expected": {name: metadata[name] for name in fields},
        "answer": answer if has_answer else last_text(episode),
        "answer_source": answer_field if has_answer else "last message",
        "judge": kind if kind == "rubrics_auto_grader" else config.get("astuner.task_judge.judge_protocol"),
        "judge_params": params,
    }
