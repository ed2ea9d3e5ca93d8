"""Stop strings: the texts at which a completion ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# A character takes at most four byte tokens; the margin covers a window that starts within a character.
_TOKENS_PER_CHARACTER, _TOKEN_MARGIN = 4, 8


class StopStrings:
    """Finds where a completion ends at one of several strings.

    Args:
        strings: at least one string, none of them empty.
        tokenizer: a transformers tokenizer. Special tokens count as text.

    Attributes:
        window: the number of tokens at a completion's end that `ends` reads.
    """

    def __init__(self, strings: Sequence[str], tokenizer: Any) -> None:
        self._strings = tuple(strings)
        self._tokenizer = tokenizer
        self.window = _TOKENS_PER_CHARACTER * max(map(len, strings)) + _TOKEN_MARGIN

    def ends(self, sampled: Sequence[int]) -> bool:
        """Return whether the last of the sampled tokens completes a string, if no earlier token did."""
        text = self._decode(sampled[-self.window :])
        return any(string in text for string in self._strings)

    def first_end(self, sampled: Sequence[int]) -> int | None:
        """Return the number of tokens up to and including the first that completes a stop string; None without one."""
        text = self._decode(sampled)
        if not any(string in text for string in self._strings):
            return None
        return next((count for count in range(1, len(sampled) + 1) if self.ends(sampled[:count])), None)

    def before(self, sampled: Sequence[int]) -> tuple[int, tuple[int, ...], str] | None:
        """Return the number of tokens before the first string, the ids for the text before it, and the string.

        None if no string occurs.

        The ids are those that were sampled. Only if a token holds the text's end and the string's beginning, the rest
        of the text is tokenised.
        """
        text = self._decode(sampled)
        found = [(text.index(string), string) for string in self._strings if string in text]
        if not found:
            return None
        end, string = min(found, key=lambda place: (place[0], -len(place[1])))
        count, prefix = len(sampled), text
        while count and not (len(prefix) <= end and text.startswith(prefix)):
            count -= 1
            prefix = self._decode(sampled[:count])
        rest = self._tokenizer.encode(text[len(prefix) : end], add_special_tokens=False) if len(prefix) < end else []
        return count, (*sampled[:count], *rest), string

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False))
