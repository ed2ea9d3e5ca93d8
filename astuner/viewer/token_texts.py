"""Texts for token ids, from the tuned model's tokenizer."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from astuner.run_record.recorded_run import RecordedRun, search_folders_of

_FILE = "tokenizer.json"
_REPLACED = "\ufffd"


class TokenTexts:
    """Converts token ids to texts."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._bytes = _byte_alphabet()
        added = tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)

    def of(self, ids: Iterable[int]) -> dict[int, str]:
        """Return the text of each id. A token with a part of a UTF-8 character is shown as bytes: `\\xe2\\x82`."""
        texts = {}
        for number in set(ids):
            # The tokenizer accepts unsigned 32-bit ids only.
            piece = self._tokenizer.id_to_token(number) if 0 <= number < 2**32 else None
            text: str = "" if piece is None else self._tokenizer.decode([number], skip_special_tokens=False)
            if piece and _REPLACED in text and all(character in self._bytes for character in piece):
                text = "".join(f"\\x{self._bytes[character]:02x}" for character in piece)
            texts[number] = text
        return texts


def find_token_texts(folder: Path) -> TokenTexts | None:
    """Return the token texts of the run in `folder`; None if its tokenizer is not on this machine."""
    facts = RecordedRun(folder)
    names = [str(folder / "model"), facts.summary and facts.summary.model, facts.model]
    for name in names:
        for path in _candidates(folder, name):
            if path.is_file():
                return _load(path, path.stat().st_mtime_ns)
    return None


@lru_cache(maxsize=4)
def _load(path: Path, _changed: int) -> TokenTexts | None:
    try:
        return TokenTexts(Tokenizer.from_file(str(path)))
    except Exception:  # `tokenizers` raises plain exceptions.
        return None


def _candidates(folder: Path, name: Any) -> list[Path]:
    if not isinstance(name, str) or not name:
        return []
    candidates = [Path(name) / _FILE]
    if not Path(name).is_absolute():
        # A name without a folder may be that of a repository on the hub.
        candidates = [*(parent / name / _FILE for parent in search_folders_of(folder)), *candidates]
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with suppress(HFValidationError):  # The name is a path.
            cached = try_to_load_from_cache(name, _FILE)
            candidates += [Path(cached)] if isinstance(cached, str) else []
    return candidates


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """Return the byte for each character in a byte-level vocabulary, as GPT-2 maps them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}
