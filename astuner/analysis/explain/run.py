"""Explanation of a run: sums over its episodes, per step and in total."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from astuner.context_tracker.audit import certificate
from astuner.diagnostics.prompt_checks import fixes_for
from astuner.run_record.episode_file import RecordedEpisode, read_recorded_episode
from astuner.run_record.episodes import EpisodeEntry
from astuner.run_record.findings import FindingSummary, read_findings, summarise_findings
from astuner.schema import Split, TokenCounts

_MAX_EPISODES_LISTED = 10


@dataclass(frozen=True)
class Totals:
    """Sums over episodes.

    Attributes:
        ok, failed, dropped: Numbers of episodes by status.
        scored: Number of episodes with a reward.
        reward: Mean reward; None without scored episodes.
        calls, samples, dropped_samples: Numbers of calls and samples.
        tokens_raw, tokens_distinct, tokens_trained: As in `TokenCounts`; `tokens_distinct` is None if the record does
            not have it.
        saving: Raw tokens per distinct token; None if unknown.
        forks: Numbers of forks by cause, the most frequent cause first.
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


@dataclass(frozen=True)
class CertificateSummary:
    """Check that the samples of the trained episodes rebuild their calls.

    Attributes:
        share: Share of the calls that the samples rebuild exactly; None if there are none.
        calls, episodes: Numbers of checked calls and episodes.
        inexact: Ids of the first ten episodes with a call that is not rebuilt.
        withheld: Number of unchecked episodes whose token ids are not in the record, as they spell a secret.
        limited: Number of unchecked episodes that lost samples to `max_sample_per_task`.
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
    """Output of `astuner explain RUN`.

    Attributes:
        run: The run's folder.
        findings: What the checks found, errors first.
        split: Split of the episodes.
        total: Sums over all episodes.
        steps: Sums by step, in ascending order.
        certificate: None if it was not requested.
        forked: The ten episodes with the most forks, later steps first among equals.
        fixes: What to try, by cause of fork.
        without_advantage: Number of training episodes with a reward but without an advantage.
    """

    run: str
    findings: tuple[FindingSummary, ...]
    split: Split
    total: Totals
    steps: Mapping[int, Totals]
    certificate: CertificateSummary | None
    forked: tuple[ForkedEpisode, ...]
    fixes: Mapping[str, str]
    without_advantage: int = 0


def explain_run(folder: Path, split: Split, entries: Iterable[EpisodeEntry], *, certify: bool) -> RunExplanation:
    """Return the explanation of a run. Episodes are read one after the other to limit the memory.

    With `certify`, every trained episode is read for the certificate; otherwise the index is sufficient.

    Raises:
        RecordError: If an episode's file cannot be read.
    """
    by_step: dict[int, list[Totals]] = {}
    forked: list[ForkedEpisode] = []
    checked = _Certificates()
    without_advantage = 0
    for entry in entries:
        without_advantage += entry.lacks_advantage
        forks = entry.forks
        is_certified = certify and entry.status == "ok"
        # The index of older versions has no forks.
        if is_certified or (forks is None and entry.calls):
            recorded = read_recorded_episode(folder / entry.path)
            forks = Counter(call.fork.cause for call in recorded.episode.calls if call.fork is not None)
            if is_certified:
                checked.add(recorded)
        forks = dict(forks or {})
        if forks:
            forked.append(ForkedEpisode(entry.episode_id, entry.step, entry.calls, entry.samples, forks))
        by_step.setdefault(entry.step, []).append(_episode_totals(entry, forks))
    steps = {step: add_totals(by_step[step]) for step in sorted(by_step)}
    total = add_totals(list(steps.values()))
    forked.sort(key=lambda episode: (sum(episode.forks.values()), episode.step), reverse=True)
    return RunExplanation(
        run=str(folder),
        findings=tuple(summarise_findings(read_findings(folder))),
        split=split,
        total=total,
        steps=steps,
        certificate=checked.summary() if certify else None,
        forked=tuple(forked[:_MAX_EPISODES_LISTED]),
        fixes=fixes_for(total.forks),
        without_advantage=without_advantage,
    )


@dataclass
class _Certificates:
    """Sums over the certificates of episodes."""

    rebuilt: int = 0
    calls: int = 0
    episodes: int = 0
    withheld: int = 0
    limited: int = 0
    inexact: list[str] = field(default_factory=list)

    def add(self, recorded: RecordedEpisode) -> None:
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

    def summary(self) -> CertificateSummary:
        share = self.rebuilt / self.calls if self.calls else None
        inexact = tuple(self.inexact[:_MAX_EPISODES_LISTED])
        return CertificateSummary(share, self.calls, self.episodes, inexact, self.withheld, self.limited)


def _episode_totals(entry: EpisodeEntry, forks: Mapping[str, int]) -> Totals:
    return Totals(
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
        saving=token_saving(entry.tokens_raw, entry.tokens_distinct),
        forks=forks,
    )


def add_totals(parts: Sequence[Totals]) -> Totals:
    """Return the sums over several sums."""
    forks: Counter[str] = Counter()
    for part in parts:
        forks.update(part.forks)
    raw = sum(part.tokens_raw for part in parts)
    counts = [part.tokens_distinct for part in parts if part.tokens_distinct is not None]
    distinct = sum(counts) if len(counts) == len(parts) else None
    scored = sum(part.scored for part in parts)
    rewards = sum(part.reward * part.scored for part in parts if part.reward is not None)
    return Totals(
        ok=sum(part.ok for part in parts),
        failed=sum(part.failed for part in parts),
        dropped=sum(part.dropped for part in parts),
        scored=scored,
        reward=rewards / scored if scored else None,
        calls=sum(part.calls for part in parts),
        samples=sum(part.samples for part in parts),
        dropped_samples=sum(part.dropped_samples for part in parts),
        tokens_raw=raw,
        tokens_distinct=distinct,
        tokens_trained=sum(part.tokens_trained for part in parts),
        saving=token_saving(raw, distinct),
        forks=dict(forks.most_common()),
    )


def token_saving(raw: int, distinct: int | None) -> float | None:
    """Return raw tokens per distinct token; None if the distinct tokens are unknown."""
    return None if distinct is None else TokenCounts(raw, distinct).saving
