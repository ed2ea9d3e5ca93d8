"""Checks, after each weight sync, that an engine samples with the trainer's weights.

Weights that do not arrive raise no error elsewhere: the engine samples with those of an earlier step, or without the
adapters, and training continues with wrong probability ratios. The check has two parts:

- The checksums of all weights are compared after each sync, where the engine can return them. They find any
  changed bit and name the weight. They take one pass over the weights' memory on each side.
- The logprobs of a few sampled tokens are compared: after each sync if the engine has no checksums, otherwise after the
  first two syncs and whenever both parts together take at most 1% of the time. The next update compares its samples'
  logprobs with the same weights in any case.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from astuner.algorithms.credit_assignment import MAX_LOGPROB_DIFFERENCE
from astuner.errors import BackboneError
from astuner.llm_engine.weight_digests import WeightDigests, differing_weights
from astuner.schema import SamplingParams

PROBE_TOKENS = 4
"""Number of tokens that an engine samples for the check."""
# Equal in each check, so that a cache of the prompt that survives new weights is found, too.
_PROBE = "The sync of weights after a training step"
_MAX_NAMED = 3
_MAX_SHARE = 0.01
_ALWAYS_PROBED = 2  # syncs: of the starting weights, and of the first trained ones


def probe_prompt(tokenizer: Any) -> list[int]:
    """Return the token ids of the check's prompt; at least one."""
    return list(tokenizer.encode(_PROBE, add_special_tokens=False)) or [0]


def probe_params(temperature: float, room: int) -> SamplingParams:
    """Return the check's sampling parameters, for at most `room` tokens after the prompt; temperature 0 becomes 1."""
    return SamplingParams(temperature=temperature or 1.0, max_tokens=max(min(PROBE_TOKENS, room), 1), seed=0)


@dataclass
class SyncCertificate:
    """Compares the engines' weights with the trainer's, one sync after another. `clock` returns seconds."""

    dtype: torch.dtype
    clock: Callable[[], float] = time.monotonic
    _handed_over: WeightDigests = field(default_factory=dict, init=False)
    _before: WeightDigests = field(default_factory=dict, init=False)
    _probes: int = field(default=0, init=False)
    _probe_seconds: float = field(default=0.0, init=False)
    _spent: float = field(default=0.0, init=False)
    _began: float = field(default=0.0, init=False)

    @property
    def probe_is_due(self) -> bool:
        """Whether to compare logprobs with an engine whose checksums have been compared.

        After the first two syncs, this holds if all checks since then, with the next one, take at most 1% of the time.
        """
        if self._probes < _ALWAYS_PROBED:
            return True
        return self._spent + self._probe_seconds <= _MAX_SHARE * (self.clock() - self._began)

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Count the time that the block takes to compare checksums."""
        started = self.clock()
        yield
        self._spent += self.clock() - started

    @contextlib.contextmanager
    def timed_probe(self) -> Iterator[None]:
        """Count the time that the block takes to compare logprobs."""
        started = self.clock()
        yield
        self._probes += 1
        self._probe_seconds = self.clock() - started
        if self._probes > _ALWAYS_PROBED:
            self._spent += self._probe_seconds
        else:
            self._spent, self._began = 0.0, self.clock()

    def begin(self, trainer: WeightDigests) -> None:
        """Take the checksums of the trainer's weights, computed in the engines' dtype, before engines are checked."""
        self._before, self._handed_over = self._handed_over, trainer

    def check_digests(self, engine: str, step: int, found: WeightDigests) -> None:
        """Compare the checksums of an engine's weights with those given to `begin`.

        Args:
            found: the checksums of the weights that the engine samples with.

        Raises:
            BackboneError: they differ.
        """
        expected = self._handed_over
        names = differing_weights(expected, found)
        if not names:
            return
        compared = len(expected.keys() & found.keys())
        stale = [name for name in names if found[name] == self._before.get(name)]
        if len(stale) == len(names):
            cause = "they still have their old values, so that the new ones have not arrived"
        elif stale:
            cause = f"{len(stale)} of them still have their old values, and the others have changed on the way"
        else:
            cause = "their values have changed on the way"
        more = ", …" if len(names) > _MAX_NAMED else ""
        raise BackboneError(
            f"{_when(step)}: {engine} does not have the trainer's weights: {len(names)} of {compared} differ "
            f"({', '.join(names[:_MAX_NAMED])}{more}); {cause}. {_FIX}"
        )

    def check_logprobs(self, engine: str, step: int, sampled: Sequence[float], trained: Sequence[float]) -> None:
        """Raise BackboneError if the logprobs of the same sampled tokens differ by more than rounding, on average."""
        gaps = [abs(a - b) for a, b in zip(sampled, trained, strict=True)]
        difference, limit = sum(gaps) / max(len(gaps), 1), MAX_LOGPROB_DIFFERENCE[self.dtype]
        if not difference <= limit:  # NaN included
            raise BackboneError(
                f"{_when(step)}: {engine} does not sample with the trainer's weights: the logprobs of {len(gaps)} "
                f"tokens differ by {difference:.3g} nats on average (rounding explains at most {limit}). Check that "
                f"the engine's logprobs are those at rollout.temperature (vLLM: processed_logprobs). {_FIX}"
            )


def _when(step: int) -> str:
    return f"the weight sync after step {step}" if step else "the first weight sync"


_FIX = (
    "Check the transfer of weights to the engine: adapters must be merged in, an engine that sleeps must take the new "
    "weights, and it must clear its prefix cache. Remove extensions that change weights; otherwise, report a bug"
)
