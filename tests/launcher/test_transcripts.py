"""Transcripts on the terminal: each message once, folded, within the width, and without control characters."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from astuner.schema import Episode, LlmCall, Message, Task
from astuner.system.redaction.redactor import learn_secrets
from astuner.viewer.transcripts import EpisodeTranscript, Shown, print_transcripts, select_episodes
from tests.launcher.conftest import Command

CALL = LlmCall("call", "episode", (1,), (2,), (0.0,), "stop")
QUESTION: Message = {"role": "user", "content": "What is 3 + 4?"}


def says(content: str, **fields: object) -> Message:
    return {"role": "assistant", "content": content, **fields}


def episode(reward: float | None, *messages: Message, task: str = "t", **changes: object) -> Episode:
    call = replace(CALL, messages=messages or (QUESTION, says(f"an answer worth {reward}")))
    made = Episode(f"{task}-{reward}", Task(task, "a question"), 0, "ok" if reward is not None else "failed", reward,
                   None if reward is None else reward > 0.5, calls=(call,))  # fmt: skip
    return replace(made, **changes)  # type: ignore[arg-type]


def lines(transcript: EpisodeTranscript, width: int = 60) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width).print(transcript)
    return out.getvalue().splitlines()


@pytest.mark.parametrize(
    ("shown", "rewards"),
    [
        (1, [1.0, 3.0]),
        (2, [1.0, None, 3.0, 2.0]),
        (3, [1.0, 0.25, None, 3.0, 2.0]),
        (9, [1.0, 0.5, 0.25, 0.0, None, 3.0, 2.0]),
        ("all", [1.0, 0.5, 0.25, 0.0, None, 3.0, 2.0]),
        ("none", []),
    ],
)
def test_the_best_and_the_worst_of_each_task_are_selected(shown: Shown, rewards: list[float | None]) -> None:
    episodes = [episode(reward) for reward in (0.25, None, 1.0, 0.5, 0.0)]
    episodes += [episode(reward, task="other") for reward in (2.0, 3.0)]
    assert [chosen.reward for _, chosen in select_episodes(episodes, shown)] == rewards


def test_equal_conversations_are_shown_once() -> None:
    same = [episode(0.0, QUESTION, says("7")) for _ in range(4)]
    assert [name for name, _ in select_episodes(same, 2)] == ["one of 4 episodes with the same reward"]
    assert len(select_episodes(same, "all")) == 4


def test_each_message_is_shown_once_with_its_speaker() -> None:
    tool_call = says("", tool_calls=[{"function": {"name": "add", "arguments": '{"a": 3}'}}], reasoning_content="I add")
    first = (QUESTION, tool_call)
    second = (*first, {"role": "tool", "content": "7"}, says("It is 7."))
    calls = (
        replace(CALL, messages=first, agent_name="solver"),
        replace(CALL, messages=second, agent_name="solver"),
        replace(CALL, messages=({"role": "user", "content": "Is 7 right?"}, says("yes")), agent_name="critic"),
    )
    shown = [line.split(maxsplit=1) for line in lines(EpisodeTranscript("best", episode(1.0, calls=calls)))[1:]]
    assert shown == [
        ["user", "What is 3 + 4?"],
        ["thinking", "I add"],
        ["solver", '→ add {"a": 3}'],
        ["tool", "7"],
        ["solver", "It is 7."],
        ["user", "Is 7 right?"],
        ["critic", "yes"],
    ]


def test_long_texts_are_folded_within_the_width() -> None:
    long = episode(1.0, QUESTION, says("\n".join(f"line {number} " + "x" * 70 for number in range(30))))
    folded, full = lines(EpisodeTranscript("best", long)), lines(EpisodeTranscript("best", long, is_folded=False))
    assert max(map(len, folded + full)) <= 60
    assert len(folded) == 2 + 8 + 1 + 3
    assert "… 49 lines …" in folded[10]
    assert len(full) == 2 + 60
    many = episode(1.0, *(says(f"message {number}") for number in range(100)))
    shown = lines(EpisodeTranscript("best", many))
    assert len(shown) == 1 + 12 + 1 + 12
    assert "message 11" in shown[12]
    assert "… 76 messages …" in shown[13]
    assert "message 88" in shown[14]


def test_no_text_acts_on_the_terminal() -> None:
    hostile = episode(1.0, QUESTION, says("\x1b[2J[bold]x[/] \u202e"), task="\x1b]0;t\x07")
    text = "\n".join(lines(EpisodeTranscript("best", hostile)))
    assert "␛[2J[bold]x[/] <U+202E>" in text
    assert "\x1b" not in text


def test_an_episode_that_failed_shows_its_error() -> None:
    failed = replace(episode(None), error_kind="workflow_error", error="KeyError: 'answer'")
    shown = lines(EpisodeTranscript("worst", failed))
    assert shown[0].startswith("── worst, failed")
    assert shown[-1] == "error      [workflow_error] KeyError: 'answer'"
    no_calls = replace(failed, calls=())
    assert "a question" in lines(EpisodeTranscript("worst", no_calls))[1]


def test_what_the_model_says_is_printed_by_debug_and_dry_run(astuner: Command, folder: object) -> None:
    debug = ("--conf", "run.yaml", "--backbone=debug", "astuner.debug.debug_first_n_tasks=1")
    default = astuner(*debug).out
    assert default.count("assistant ") == 2
    assert "best of 4 episodes, reward 3.00" in default
    assert "worst of 4 episodes, reward 0.00" in default
    assert astuner(*debug, "--show=all").out.count("assistant ") == 4
    assert astuner(*debug, "--show", "none").out.count("assistant ") == 0
    dry_run = astuner("check", "--conf", "run.yaml", "--dry-run", "--show=1")
    assert "best of 4 episodes" in dry_run.out
    assert "worst of" not in dry_run.out
    for words in (("--show=few",), ("--show=1", "--backbone=local")):
        assert astuner(*debug, *words).code == 2
    assert astuner("check", "--conf", "run.yaml", "--show=1").code == 2


def test_secrets_are_redacted() -> None:
    learn_secrets({"TRANSCRIPT_API_KEY": "plainlooking-0a1b2c3d"})
    told = episode(1.0, QUESTION, says("the key is plainlooking-0a1b2c3d"))
    out = io.StringIO()
    print_transcripts(Console(file=out, width=80), [told], 2)
    assert "plainlooking" not in out.getvalue()
