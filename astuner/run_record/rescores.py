"""The files of a rescored run: a folder beside the run's folder, or elsewhere.

rescore.json    # the comparison of the rewards, its steps, and the audit
episodes.jsonl  # one line per episode
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astuner.errors import RecordError
from astuner.run_record.files import dump_json, read_json_document, read_json_lines, write_atomically, write_errors
from astuner.run_record.jsonable import decode, encode
from astuner.schema import Judgement, Split
from astuner.system.redaction.redactor import current_redactor

_SUMMARY = "rescore.json"
_EPISODES = "episodes.jsonl"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class RescoredEpisode:
    """An episode with its recorded reward and that of the new judge.

    Attributes:
        episode_id, task_id, repeat_index, step, split, path: As in the index of the run.
        reward_before, reward: The recorded and the new reward; None if the episode is unscored.
        advantage_before, advantage: The advantages that the algorithm derives from them; None for an episode that is
            not trained.
        is_success: Whether the new judge considers the task solved; None if the episode is unscored.
        error_kind, error: The reason that the episode is unscored, as in `Episode`.
        judgement: The result of the new judge; None if it was not asked, or failed.
        held_out_reward: The reward of an audit's held-out judge.
    """

    episode_id: str
    task_id: str
    repeat_index: int
    step: int
    split: Split
    path: str
    reward_before: float | None
    reward: float | None
    advantage_before: float | None = None
    advantage: float | None = None
    is_success: bool | None = None
    error_kind: str | None = None
    error: str | None = None
    judgement: Judgement | None = None
    held_out_reward: float | None = None

    @property
    def is_changed(self) -> bool:
        """Whether the new reward differs from the recorded one, or only one of them exists."""
        return self.reward != self.reward_before

    @property
    def flips_sign(self) -> bool:
        """Whether the advantages have opposite signs: the update would push the answer the other way."""
        return (self.advantage_before or 0.0) * (self.advantage or 0.0) < 0


@dataclass(frozen=True, slots=True)
class RescoredStep:
    """The comparison of a step.

    Attributes:
        step, split: The step.
        episodes, changed, sign_flips, unscored: Numbers of episodes.
        reward_before, reward: Mean rewards; None without scored episodes.
        kendall_tau: Rank correlation (tau-b) of the rewards; None if all rewards of a judge are equal.
        similarity: Cosine of the two advantage vectors; None if one of them is 0.
        gradient_differs: Whether an episode's or a call's advantage differs, and so the gradient of the update.
    """

    step: int
    split: Split
    episodes: int
    changed: int
    sign_flips: int
    unscored: int
    reward_before: float | None
    reward: float | None
    kendall_tau: float | None
    similarity: float | None
    gradient_differs: bool


@dataclass(frozen=True, slots=True)
class Disagreement:
    """An episode that two judges rank differently; `rank` and `held_out_rank` are shares of the episodes below it."""

    episode_id: str
    step: int
    reward: float
    held_out_reward: float
    rank: float
    held_out_rank: float


@dataclass(frozen=True, slots=True)
class DivergingStep:
    """A step at which the mean reward rises while that of the held-out judge falls, compared with the step before."""

    step: int
    reward_before: float
    reward: float
    held_out_before: float
    held_out: float


@dataclass(frozen=True, slots=True)
class RewardAudit:
    """Signs of reward hacking: a reward that rises while a held-out judge sees no improvement.

    Attributes:
        judge, held_out: Names of the audited judge and the held-out judge; `recorded` for the
            rewards in the record.
        episodes: Number of episodes that both have scored.
        kendall_tau: Rank correlation (tau-b) of the two rewards.
        trend, held_out_trend: Rank correlation of the steps with their mean rewards; 1 for a steady rise.
        diverges: Whether the reward has a rising trend and the held-out reward a falling one.
        diverging_steps: Steps with opposite changes, each larger than its standard error.
        disagreements: The episodes that the judges rank most differently.
    """

    judge: str
    held_out: str
    episodes: int
    kendall_tau: float | None
    trend: float | None
    held_out_trend: float | None
    diverges: bool
    diverging_steps: tuple[DivergingStep, ...]
    disagreements: tuple[Disagreement, ...]


@dataclass(frozen=True, slots=True)
class Rescore:
    """A run that was scored with another judge.

    Attributes:
        run: The run's folder.
        judge, params: The new judge, as `package.module->Class`, and its parameters.
        algorithm: The algorithm whose advantages are compared.
        episodes: Number of episodes that the judge was asked to score.
        changed, sign_flips: Numbers of episodes whose reward, and whose advantage's sign, changes.
        unscored: Number of episodes that the new judge could not score, and `errors` how many by kind.
        first_error: The first one's message.
        skipped: Number of episodes without an output to judge, because their workflow failed.
        kept: Number of episodes that keep their reward, because the run ended them for degenerate output.
        kendall_tau: Rank correlation (tau-b) of the recorded and the new rewards; None if all rewards of one judge are
            equal.
        episodes_per_second: Speed of reading and judging.
        steps: The steps, in ascending order.
        audit: The audit; None if it was not requested.
    """

    run: str
    judge: str
    params: Mapping[str, Any]
    algorithm: str
    episodes: int
    changed: int
    sign_flips: int
    unscored: int
    skipped: int
    kept: int
    kendall_tau: float | None
    episodes_per_second: float
    steps: tuple[RescoredStep, ...]
    errors: Mapping[str, int] = field(default_factory=dict)
    first_error: str | None = None
    audit: RewardAudit | None = None

    @property
    def steps_with_other_gradient(self) -> int:
        """The number of steps whose gradient would have differed."""
        return sum(step.gradient_differs for step in self.steps)


def create_rescore_folder(run: Path, judge: str, output: Path | None) -> Path:
    """Create the folder of a rescored run: `output`, or a new one beside the run's folder, which is not changed.

    Raises:
        RecordError: If `output` exists and is not empty, is inside the run's folder, or cannot be created.
    """
    run = run.absolute()
    if output is None:
        stem, number = f"{run.name}-rescore-{judge.rpartition('->')[2]}", 1
        output = run.parent / stem
        while output.exists():
            number += 1
            output = run.parent / f"{stem}-{number}"
    elif output.resolve().is_relative_to(run.resolve()):
        raise RecordError(f"{output} is inside the run's folder, which is not changed; choose another --output")
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise RecordError(f"{output} is not an empty folder; choose another --output")
    with write_errors(output):
        output.mkdir(parents=True, exist_ok=True)
    return output


def write_rescore(folder: Path, rescore: Rescore, episodes: Iterable[RescoredEpisode]) -> None:
    """Write the files of a rescored run; `RecordError` if that fails."""
    redact = current_redactor()
    lines = [dump_json(encode(episode, redact)) + b"\n" for episode in episodes]
    write_atomically(folder / _EPISODES, b"".join(lines))
    # Last: a folder without it is not a rescored run.
    document = {"format": _FORMAT, **encode(rescore, redact)}
    write_atomically(folder / _SUMMARY, json.dumps(document, indent=1).encode() + b"\n")


def read_rescore(folder: Path) -> Rescore:
    """Return the comparison that `write_rescore` wrote into a folder; `RecordError` if it cannot be read."""
    return decode(Rescore, read_json_document(folder / _SUMMARY, "a rescored run", _FORMAT))


def read_rescored_episodes(folder: Path) -> list[RescoredEpisode]:
    """Return a rescored run's episodes, in the order of the run's index; `RecordError` if they cannot be read."""
    return [decode(RescoredEpisode, row) for _, row in read_json_lines(folder / _EPISODES)]


def find_rescores(run: Path) -> dict[str, Rescore]:
    """Return a run's rescored versions that are beside its folder, by folder name."""
    found = {}
    for path in sorted(run.absolute().parent.glob(f"*/{_SUMMARY}")):
        try:
            rescore = read_rescore(path.parent)
        except RecordError:  # the folder belongs to something else, or is being written
            continue
        if Path(rescore.run).name == run.absolute().name:
            found[path.parent.name] = rescore
    return found
