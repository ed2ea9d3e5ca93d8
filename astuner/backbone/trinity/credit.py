"""Advantages and weights of a batch's experiences, as every backbone computes them (`advantage_fn`).

Trinity's own advantages count experiences, of which an episode has as many as it has timelines. Here an episode counts
once, and its weight does not depend on how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trinity.algorithm.advantage_fn import AdvantageFn
from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity.common.experience import CustomField, Experience

from astuner.backbone.algorithms import Algorithm, resolve
from astuner.backbone.rows import Row, mini_batches, prompt_length, row_scales, token_advantages
from astuner.backbone.step_credit import UpdateResult, shuffle_seed, step_credit, teaches, uses_kl_loss
from astuner.backbone.trinity.desk import DeskJob, desk
from astuner.backbone.trinity.experiences import EPISODE, SAMPLE, STEP, filler
from astuner.backbone.trinity.news import Credited
from astuner.config.root import AstunerConfig
from astuner.schema import Episode

COUNT = "of"
"""Key of `Experience.info`: how many experiences its mini-batch has."""
CALLS, COUNTS, SCALE, REFERENCE = "calls", "counts", "scale", "reference"
"""The same, of what the loss takes beside Trinity's own: see `EpisodeLoss`."""

_FIELDS = [
    CustomField(CALLS, "call_spans", torch.int64),
    CustomField(COUNTS, "token_counts", torch.int64),
    CustomField(SCALE, "row_scale", torch.float32),
]
# Trinity's trainer asks for the starting model's logprobs even where nothing computes them.
_NO_REFERENCE = CustomField(REFERENCE, "ref_logprob", torch.float32)


class EpisodeAdvantages(AdvantageFn, ExperienceOperatorV1):
    """Turns all experiences of a training step into its mini-batches, in the order in which they are trained."""

    async def prepare(self) -> None:
        """Ask what the run is."""
        job: DeskJob = await desk().job.remote()
        self._config, self._updates = job.agent.config, job.updates

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """Return the experiences that are trained, mini-batch after mini-batch."""
        if not exps:
            return [], {}
        step = exps[0].info[STEP]
        episodes = await desk().take_usable.remote(step)
        known = {(one.info[EPISODE], one.info[SAMPLE]): one for one in exps}
        # What came of a runner that was lost on the way is recorded, and not trained.
        episodes = [one for one in episodes if (one.episode_id, 0) in known]
        result, parts = _credited(self._config, self._updates, step, episodes)
        algorithm = resolve(self._config.trainer_common.algorithm)
        found = [_mini_batch(self._config, algorithm, part, episodes, known) for part in parts]
        samples = frozenset((one.info[EPISODE], one.info[SAMPLE]) for part in found for one in part)
        await desk().post.remote(Credited(step, tuple(one.episode_id for one in episodes), result, samples))
        kl = uses_kl_loss(self._config)
        return [one for part in found for one in part or [idle(step, exps[0], reference=kl)]], {}

    def __call__(self, exps: Any, **_: Any) -> Any:
        """Not asked for: `process` is.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return nothing."""
        return {}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Advantages are computed before the trainer gets the experiences."""
        return False


def _credited(
    config: AstunerConfig, updates: int, step: int, episodes: Sequence[Episode]
) -> tuple[UpdateResult | None, list[list[Row]]]:
    """Return what the launcher is told, and the rows of each mini-batch; of those there are always `updates`."""
    if not episodes:
        return None, [[] for _ in range(updates)]
    credit = step_credit(config, resolve(config.trainer_common.algorithm), episodes, None)
    rows = credit.given_to(
        [
            Row.of_sample(sample, index, number)
            for index, episode in enumerate(episodes)
            for number, sample in enumerate(episode.samples)
        ]
    )
    dealt = mini_batches(rows, updates, shuffle_seed(config, step)) if rows else []
    parts = [[rows[place] for place in part] for part in dealt]
    return credit.result({}, rows), parts + [[] for _ in range(updates - len(parts))]


def _mini_batch(
    config: AstunerConfig,
    algorithm: Algorithm,
    rows: Sequence[Row],
    episodes: Sequence[Episode],
    known: Mapping[tuple[str, int], Experience],
) -> list[Experience]:
    """Return the experiences of a mini-batch that have a gradient; none where none has."""
    if not rows or not teaches(config, rows):
        return []
    scales = row_scales(rows, algorithm.loss_agg_mode, config.data.max_response_length).tolist()
    kl = uses_kl_loss(config)
    wanted = [place for place, row in enumerate(rows) if kl or row.has_advantage]
    found = []
    for place in wanted:
        row = rows[place]
        episode = episodes[row.episode]
        start = prompt_length(episode.samples[row.sample])
        one = known[episode.episode_id, row.sample]
        one.advantages = token_advantages([row], len(row.token_ids))[0, start:]
        one.info |= {
            # Relative to the response, as the trainer's tensors are.
            CALLS: [(begin - start, end - start) for begin, end in row.calls],
            COUNTS: list(row.loss_mask[start:]),
            # The trainer divides by the number of experiences; these weights are of the whole mini-batch already.
            SCALE: [scales[place] * len(wanted)],
            COUNT: len(wanted),
        }
        found.append(_with_fields(one, reference=kl))
    return found


def idle(step: int, like: Experience, *, reference: bool) -> Experience:
    """Return what fills a mini-batch without gradient, so that the trainer's steps stay in time with the explorer's."""
    one = filler(step)
    one.advantages = torch.zeros(1)
    one.info |= {key: like.info[key] for key in like.info.keys() - one.info.keys()}
    one.info |= {CALLS: [(0, 0)], COUNTS: [0], SCALE: [0.0], COUNT: 1}
    return _with_fields(one, reference=reference)


def _with_fields(one: Experience, *, reference: bool) -> Experience:
    """Return the experience with what the loss takes beside Trinity's own.

    Args:
        one: with its info.
        reference: whether the trainer computes the starting model's logprobs.
    """
    one.custom_fields = list(_FIELDS)
    if not reference:
        one.info[REFERENCE] = [0.0] * len(one.action_mask)
        one.custom_fields.append(_NO_REFERENCE)
    return one
