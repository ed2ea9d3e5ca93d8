"""Equal errors of episodes are described once, with their number and their tasks."""

from __future__ import annotations

from astuner.schema import Episode, Task
from astuner.task_rollout.rollout import describe_failures


def failed(task: str, error: str, kind: str = "workflow") -> Episode:
    return Episode(f"train-1-{task}-0", Task(task, "?"), 0, "failed", None, None, error_kind=kind, error=error)


def test_errors_that_differ_in_numbers_are_one() -> None:
    episodes = [failed(f"t{number % 5}", f"ValueError: no tool {number}") for number in range(12)]
    episodes.insert(0, failed("other", "the episode took longer than 5 s", "timeout"))
    episodes.append(Episode("ok", Task("t", "?"), 0, "ok", 1.0, True))
    assert describe_failures(episodes) == [
        "[workflow] ValueError: no tool 0 (12 times, tasks t0, t1, t2 and 2 more)",
        "[timeout] the episode took longer than 5 s (task other)",
    ]


def test_many_errors_are_counted() -> None:
    episodes = [failed("t", f"Error: {word}") for word in ("a", "a", "b", "c", "d", "e")]
    assert describe_failures(episodes) == [
        "[workflow] Error: a (2 times, task t)",
        "[workflow] Error: b (task t)",
        "[workflow] Error: c (task t)",
        "2 other errors (2 episodes)",
    ]


def test_no_failure_has_no_description() -> None:
    assert describe_failures([Episode("ok", Task("t", "?"), 0, "ok", 1.0, True)]) == []
