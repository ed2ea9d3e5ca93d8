"""Sums over episodes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from astuner.run_record import EpisodeEntry
from astuner.schema import TokenCounts


@dataclass(frozen=True)
class Account:
    """Sums over episodes.

    Attributes:
        ok, failed, dropped: how many episodes ended so.
        scored: how many have a reward.
        reward: the mean of these, None without one.
        calls, samples, dropped_samples: how many.
        tokens_raw, tokens_distinct, tokens_trained: as in `TokenCounts`; `tokens_distinct` is None where the record
            does not have it.
        saving: raw tokens for each distinct one, None likewise.
        forks: how many, by cause, the most frequent first.
    """

    ok: int
    failed: int
    dropped: int
    scored: int
    reward: float | None
    calls: int
    samples: int
    dropped_samples: int
    tokens_raw: int
    tokens_distinct: int | None
    tokens_trained: int
    saving: float | None
    forks: Mapping[str, int]

    @property
    def episodes(self) -> int:
        """How many episodes."""
        return self.ok + self.failed + self.dropped


def account_of(entry: EpisodeEntry, forks: Mapping[str, int]) -> Account:
    """Return the account of one episode."""
    return Account(
        ok=int(entry.status == "ok"),
        failed=int(entry.status == "failed"),
        dropped=int(entry.status == "dropped"),
        scored=int(entry.reward is not None),
        reward=entry.reward,
        calls=entry.calls,
        samples=entry.samples,
        dropped_samples=entry.dropped_samples,
        tokens_raw=entry.tokens_raw,
        tokens_distinct=entry.tokens_distinct,
        tokens_trained=entry.tokens_trained,
        saving=saving(entry.tokens_raw, entry.tokens_distinct),
        forks=forks,
    )


def total(accounts: Sequence[Account]) -> Account:
    """Return one account for several."""
    forks: Counter[str] = Counter()
    for account in accounts:
        forks.update(account.forks)
    raw = sum(account.tokens_raw for account in accounts)
    distinct = _sum_if_known(account.tokens_distinct for account in accounts)
    scored = sum(account.scored for account in accounts)
    rewards = sum(account.reward * account.scored for account in accounts if account.reward is not None)
    return Account(
        ok=sum(account.ok for account in accounts),
        failed=sum(account.failed for account in accounts),
        dropped=sum(account.dropped for account in accounts),
        scored=scored,
        reward=rewards / scored if scored else None,
        calls=sum(account.calls for account in accounts),
        samples=sum(account.samples for account in accounts),
        dropped_samples=sum(account.dropped_samples for account in accounts),
        tokens_raw=raw,
        tokens_distinct=distinct,
        tokens_trained=sum(account.tokens_trained for account in accounts),
        saving=saving(raw, distinct),
        forks=dict(forks.most_common()),
    )


def saving(raw: int, distinct: int | None) -> float | None:
    """Return raw tokens for each distinct one, None where these were not counted."""
    return None if distinct is None else TokenCounts(raw, distinct).saving


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    known = list(counts)
    return None if None in known else sum(count for count in known if count is not None)
