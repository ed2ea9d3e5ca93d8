"""Constrained decoding: the tokens that a grammar allows next."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from astuner.errors import UnsupportedParameterError
from astuner.schema import OutputConstraint


class GrammarMatcher:
    """The state of one completion in a grammar.

    Args:
        matcher: a matcher of llguidance.
        vocab_size: the number of tokens of the model.

    Attributes:
        failure: why the grammar can no longer be followed; None if it can.
    """

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self.failure: str | None = None

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens may come next, [vocabulary]; all if the grammar has failed (see `failure`)."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        known = np.unpackbits(bits, bitorder="little")[: self._vocab_size].astype(np.bool_)
        if self._matcher.is_error() or not known.any():
            self.failure = self._matcher.get_error() or "no token fits"
            return np.ones(self._vocab_size, np.bool_)
        return np.pad(known, (0, self._vocab_size - len(known)))

    def accept(self, token_id: int) -> None:
        """Append a token, which must be an allowed one."""
        self._matcher.consume_token(token_id)

    @property
    def is_complete(self) -> bool:
        """Whether no token but an end token can follow."""
        return bool(self._matcher.is_stopped())


class GrammarCompiler:
    """Compiles constraints for one tokenizer. Thread-safe.

    Args:
        tokenizer: a fast transformers tokenizer.
        vocab_size: the number of tokens of the model.
    """

    def __init__(self, tokenizer: Any, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._by_ends: dict[tuple[int, ...], Any] = {}

    def matcher(self, constraint: OutputConstraint, end_ids: Sequence[int]) -> GrammarMatcher:
        """Return a matcher at the beginning of a constraint's text.

        Args:
            constraint: the constraint.
            end_ids: the tokens that may end a complete text.

        Raises:
            UnsupportedParameterError: the grammar is invalid or not supported, or llguidance is not installed.
        """
        name = constraint.parameter
        try:
            from llguidance import LLMatcher
        except ImportError as error:
            raise UnsupportedParameterError(
                f"{name} needs the package llguidance, which is not installed: pip install 'astuner[constrained]', or "
                f"leave {name} out",
                name,
            ) from error
        matcher = LLMatcher(self._tokenizer_for(tuple(end_ids), name), constraint.grammar, log_level=0)
        if matcher.is_error():
            reason = matcher.get_error().strip().partition("\n")[0]
            raise UnsupportedParameterError(
                f"{name} cannot be enforced: {reason}. Use a JSON schema without this feature, or leave {name} out",
                name,
            )
        return GrammarMatcher(matcher, self._vocab_size)

    def _tokenizer_for(self, end_ids: tuple[int, ...], name: str) -> Any:
        from llguidance.hf import from_tokenizer

        with self._lock:
            if end_ids not in self._by_ends:
                try:
                    ends = list(end_ids) or None
                    self._by_ends[end_ids] = from_tokenizer(self._tokenizer, self._vocab_size, eos_token=ends)
                except ValueError as error:
                    raise UnsupportedParameterError(
                        f"{name} cannot be enforced with this model's tokenizer: {error}. Leave {name} out", name
                    ) from error
            return self._by_ends[end_ids]
