"""Template tokens in an episode with many forks."""

from __future__ import annotations

from typing import Any

from astuner.schema import LlmCall
from astuner.viewer.trie import Trie, template_runs


class Counted(dict[int, str]):
    """Texts of tokens, with a count of the lookups."""

    lookups = 0

    def get(self, number: int, default: Any = None) -> Any:
        self.lookups += 1
        return super().get(number, default)


def forked(forks: int) -> tuple[list[LlmCall], Counted]:
    """Calls that share twenty messages. Each token is a word; 0 starts a message and is the template's."""
    texts = Counted({0: "<turn>"} | {number: f"w{number} " for number in range(1, 1000)})
    start: list[int] = []
    shared = []
    for turn in range(20):
        words = [1 + turn * 40 + place for place in range(40)]
        start += [0, *words]
        shared.append({"role": "user", "content": "".join(texts[word] for word in words)})
    calls = []
    for fork in range(forks):
        suffix = [900 + fork % 50, 850 + fork // 50, 0, 0]
        message = {"role": "user", "content": texts[suffix[0]] + texts[suffix[1]]}
        calls.append(LlmCall(f"c{fork}", "e", (*start, 0, *suffix), (7,), (-0.1,), "stop", messages=(*shared, message)))
    return calls, texts


def flags(call: int, trie: Trie, runs: dict[int, list[list[int]]]) -> list[int]:
    kinds = []
    for number in trie.path(call):
        inside = {place for begin, end in runs.get(number, ()) for place in range(begin, end)}
        kinds += [int(place in inside) for place in range(len(trie.segments[number].ids))]
    return kinds


def test_shared_messages_are_located_once():
    calls, texts = forked(100)
    trie = Trie(calls)
    together = template_runs(trie, calls, texts)
    assert texts.lookups < 3 * sum(len(segment.ids) for segment in trie.segments)
    for number, call in enumerate(calls):
        alone = Trie([call])
        expected = flags(0, alone, template_runs(alone, [call], texts))
        assert flags(number, trie, together) == expected
        assert expected == [int(token == 0) for token in call.prompt_ids] + [0]
