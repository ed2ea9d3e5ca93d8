"""The account of a run: what its episodes came to, step by step and in all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from astuner.context_tracker import certificate
from astuner.launcher.explain.account import Account, account_of, total
from astuner.launcher.explain.advice import fixes_for
from astuner.run_record import EpisodeEntry, RecordedEpisode, Split, read_recorded_episode

_MOST_EPISODES_NAMED = 10


@dataclass(frozen=True)
class CertificateAccount:
    """Whether the samples of the trained episodes rebuild their calls.

    Attributes:
        share: share of the calls that they rebuild exactly; None where there was nothing to check.
        calls, episodes: how many were checked.
        inexact: ids of episodes of which a call is not rebuilt, the first ten.
        withheld: episodes whose token ids the record leaves out, as they spell a secret; not checked.
        limited: episodes that lost samples to `max_sample_per_task`; not checked.
    """

    share: float | None
    calls: int
    episodes: int
    inexact: tuple[str, ...]
    withheld: int
    limited: int


@dataclass(frozen=True)
class ForkedEpisode:
    """An episode with forks, counted by cause."""

    episode_id: str
    step: int
    calls: int
    samples: int
    forks: Mapping[str, int]


@dataclass(frozen=True)
class RunExplanation:
    """What `astuner explain RUN` says.

    Attributes:
        run: the run's folder.
        split: which episodes.
        total: over all of them.
        steps: by step, in order.
        certificate: None where it was not asked for.
        forked: the ten episodes with the most forks, the later one first among equals.
        fixes: what to try, by cause of fork.
    """

    run: str
    split: Split
    total: Account
    steps: Mapping[int, Account]
    certificate: CertificateAccount | None
    forked: tuple[ForkedEpisode, ...]
    fixes: Mapping[str, str]


def explain_run(folder: Path, split: Split, entries: Iterable[EpisodeEntry], *, certify: bool) -> RunExplanation:
    """Account for the episodes of a run, one after the other, so that memory does not grow with their tokens.

    Args:
        folder: the run's.
        split: that of `entries`.
        entries: the episodes.
        certify: whether to read every trained episode for the certificate; else the index is enough.

    Raises:
        RecordError: an episode's file cannot be read.
    """
    accounts: dict[int, list[Account]] = {}
    forked: list[ForkedEpisode] = []
    check = _Certifier()
    for entry in entries:
        forks = entry.forks
        if (certify and entry.status == "ok") or (forks is None and entry.calls):
            recorded = read_recorded_episode(folder / entry.path)
            forks = _forks(recorded)
            if certify and entry.status == "ok":
                check.add(recorded)
        forks = forks or {}
        if forks:
            forked.append(ForkedEpisode(entry.episode_id, entry.step, entry.calls, entry.samples, forks))
        accounts.setdefault(entry.step, []).append(account_of(entry, forks))
    steps = {step: total(accounts[step]) for step in sorted(accounts)}
    in_all = total(list(steps.values()))
    forked.sort(key=lambda episode: (sum(episode.forks.values()), episode.step), reverse=True)
    return RunExplanation(
        run=str(folder),
        split=split,
        total=in_all,
        steps=steps,
        certificate=check.account() if certify else None,
        forked=tuple(forked[:_MOST_EPISODES_NAMED]),
        fixes=fixes_for(in_all.forks),
    )


@dataclass
class _Certifier:
    """Adds up the certificates of episodes."""

    rebuilt: int = 0
    calls: int = 0
    episodes: int = 0
    withheld: int = 0
    limited: int = 0
    inexact: list[str] = field(default_factory=list)

    def add(self, recorded: RecordedEpisode) -> None:
        """Check an episode."""
        episode = recorded.episode
        if recorded.withheld:
            self.withheld += 1
        elif episode.dropped_samples:
            self.limited += 1
        else:
            share = certificate(episode.calls, episode.samples)
            calls = sum(call.trained and bool(call.completion_ids) for call in episode.calls)
            self.rebuilt += round(share * calls)
            self.calls += calls
            self.episodes += 1
            if share < 1.0:
                self.inexact.append(episode.episode_id)

    def account(self) -> CertificateAccount:
        """Return the sums."""
        share = self.rebuilt / self.calls if self.calls else None
        inexact = tuple(self.inexact[:_MOST_EPISODES_NAMED])
        return CertificateAccount(share, self.calls, self.episodes, inexact, self.withheld, self.limited)


def _forks(recorded: RecordedEpisode) -> Mapping[str, int]:
    return dict(Counter(call.fork.cause for call in recorded.episode.calls if call.fork is not None))
