"""The answer of an episode, as lists show it."""

from __future__ import annotations

import pytest

from astuner.run_record.episodes import answer_of, brief_answer
from astuner.schema import Episode, LlmCall, Task

LINES = [
    ("42", "42"),
    (
        str([{"type": "text", "text": "It is\n\\boxed{4}"}, {"type": "text", "text": "'Done.'"}]),
        "It is\n\\boxed{4}\n'Done.'",
    ),
    ("[{'type': 'text', 'text': 'open", "[{'type': 'text', 'text': 'open"),
    ("[{'type': 'text', 'text': __import__('os')}]", "[{'type': 'text', 'text': __import__('os')}]"),
    (str([{"type": "text", "text": ""}]), "[{'type': 'text', 'text': ''}]"),
    ("  ", "the last message"),
    (None, "the last message"),
    (["a", "list"], "the last message"),
]


@pytest.mark.parametrize(("final", "expected"), LINES)
def test_the_text_of_an_answer(final: object, expected: str):
    messages = ({"role": "user", "content": "?"}, {"role": "assistant", "content": "the last message"})
    call = LlmCall("c", "e", (1,), (2,), (-0.5,), "stop", messages=messages)
    episode = Episode("e", Task("t", "?"), 0, "ok", 1.0, True, (call,), metadata={"final_answer": final})
    assert answer_of(episode) == expected


def test_a_long_answer_keeps_its_beginning_and_its_end():
    line = brief_answer("begin\n" + "x " * 100_000 + "end")
    assert line.startswith("begin x")
    assert line.endswith("x end")
    assert len(line) < 310
