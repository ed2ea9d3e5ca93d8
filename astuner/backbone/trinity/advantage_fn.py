"""Converts episodes to Trinity's experiences and computes their advantages (Trinity's `advantage_fn`).

Trinity's advantage functions count experiences, and an episode has one experience per timeline. `EpisodeAdvantages`
uses the algorithms that all backbones share, in which an episode's weight does not depend on its number of timelines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from trinity.algorithm.advantage_fn import AdvantageFn
from trinity.buffer.operators.experience_operator import ExperienceOperatorV1
from trinity.common.experience import EID, CustomField, Experience

from astuner.algorithms.credit_assignment import (
    UpdateResult,
    has_gradient,
    shuffle_seed,
    step_advantages,
    trains_without_advantage,
    uses_kl_loss,
)
from astuner.algorithms.distillation.distiller import Distiller, load_distiller
from astuner.algorithms.registry import Algorithm, resolve
from astuner.algorithms.training_rows import (
    TrainingRow,
    mini_batches,
    prompt_length,
    row_scales,
    token_advantages,
    training_rows,
)
from astuner.backbone.trinity.coordinator import AdvantagesReady, CoordinatorJob, SampleKey, WorkerFailed, coordinator
from astuner.config.root import AstunerConfig
from astuner.errors import AstunerError, BackboneError
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.schema import Episode

EPISODE, SAMPLE, STEP = "episode", "sample", "step"
"""Keys of `Experience.info`: the episode's id, the sample's index in it, and the training step."""
MINI_BATCH_SIZE = "mini_batch_size"
"""Key of `Experience.info`: number of experiences in the mini-batch."""
CALLS, COUNTS, SCALE, REFERENCE = "calls", "counts", "scale", "reference"
"""Keys of `Experience.info`: additional inputs of the loss; see `EpisodeLoss`."""

_FIELDS = [
    CustomField(CALLS, "call_spans", torch.int64),
    CustomField(COUNTS, "token_counts", torch.int64),
    CustomField(SCALE, "row_scale", torch.float32),
]
# Trinity's trainer reads reference logprobs even if none are computed.
_ZERO_REFERENCE = CustomField(REFERENCE, "ref_logprob", torch.float32)


def experiences(episode: Episode, step: int, task_index: int) -> list[Experience]:
    """Return one experience per sample, with the tracker's token ids, logprobs and mask unchanged."""
    result = []
    for index, sample in enumerate(episode.samples):
        start = prompt_length(sample)
        result.append(
            Experience(
                eid=EID(task=task_index, run=episode.repeat_index, step=index),
                tokens=torch.tensor(sample.token_ids, dtype=torch.int32),
                logprobs=torch.tensor(sample.logprobs[start:], dtype=torch.float32),
                reward=episode.reward,
                prompt_length=start,
                action_mask=torch.tensor(sample.train_counts[start:]).bool(),
                info={EPISODE: episode.episode_id, SAMPLE: index, STEP: step},
            )
        )
    return result


def empty_experience(step: int) -> Experience:
    """Return the shortest possible experience without trained tokens."""
    return Experience(
        tokens=[0, 0],
        logprobs=[0.0],
        reward=0.0,
        prompt_length=1,
        action_mask=[False],
        info={EPISODE: "", SAMPLE: 0, STEP: step},
    )


class EpisodeAdvantages(AdvantageFn, ExperienceOperatorV1):
    """Splits the experiences of a training step into mini-batches, in training order, and sets their advantages."""

    async def prepare(self) -> None:
        """Read the run's configuration from the coordinator."""
        self._job: CoordinatorJob = await coordinator().job.remote()
        self._config, self._updates = self._job.agent.config, self._job.updates
        self._distiller: Distiller | None = None

    async def process(self, exps: list[Experience]) -> tuple[list[Experience], dict[str, float]]:
        """Return the experiences to train, one mini-batch after another, and no metrics."""
        if not exps:
            return [], {}
        step = exps[0].info[STEP]
        by_key = {(exp.info[EPISODE], exp.info[SAMPLE]): exp for exp in exps}
        episodes = await coordinator().pop_usable_episodes.remote(step)
        # Episodes of a runner that died before it returned them are recorded, but not trained.
        episodes = [episode for episode in episodes if (episode.episode_id, 0) in by_key]
        try:
            # A teacher takes long, and this process has other requests to answer.
            result, row_batches = await asyncio.to_thread(self._assign, step, episodes)
        except AstunerError as error:
            # The launcher ends the run once it has recorded the episodes of this step.
            await coordinator().post_event.remote(WorkerFailed(BackboneError(f"step {step}: {error}"), step))
            return [], {}
        algorithm = resolve(self._config.trainer_common.algorithm)
        batches = [mini_batch(self._config, algorithm, rows, episodes, by_key) for rows in row_batches]
        keys = frozenset((exp.info[EPISODE], exp.info[SAMPLE]) for batch in batches for exp in batch)
        await coordinator().post_event.remote(
            AdvantagesReady(step, tuple(episode.episode_id for episode in episodes), result, keys)
        )
        use_reference = uses_kl_loss(self._config)
        return [
            exp
            for batch in batches
            for exp in batch or [padding_experience(step, exps[0], use_reference=use_reference)]
        ], {}

    def _assign(self, step: int, episodes: Sequence[Episode]) -> tuple[UpdateResult | None, list[list[TrainingRow]]]:
        agent, settings = self._job.agent, self._config.trainer_common.distillation
        if settings.teacher is not None and self._distiller is None:
            codec = ChatCodec(load_tokenizer(agent.model_path), self._config.model.renderer)
            path = self._job.teacher_path
            self._distiller = load_distiller(self._config, codec, None, teacher_path=path, device=torch.device("cpu"))
        return assign_mini_batches(self._config, self._updates, step, episodes, self._distiller)

    def __call__(self, exps: Any, **_: Any) -> Any:
        """Raise NotImplementedError: Trinity calls `process`."""
        raise NotImplementedError

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no arguments."""
        return {}

    @classmethod
    def compute_in_trainer(cls) -> bool:
        """Return False: advantages are computed before the trainer reads the experiences."""
        return False


def assign_mini_batches(
    config: AstunerConfig,
    updates: int,
    step: int,
    episodes: Sequence[Episode],
    distiller: Distiller | None = None,
) -> tuple[UpdateResult | None, list[list[TrainingRow]]]:
    """Return the step's result for the launcher, and the rows for each of its `updates` mini-batches."""
    if not episodes:
        return None, [[] for _ in range(updates)]
    advantages = step_advantages(config, resolve(config.trainer_common.algorithm), episodes, None)
    rows = advantages.assign_to(training_rows(episodes))
    metrics: dict[str, float] = {}
    if distiller is not None:
        rows, metrics = distiller.assign_to(rows, episodes)
    unit = config.trainer_common.mini_batch_by
    indices = mini_batches(rows, advantages.groups, updates, shuffle_seed(config, step), unit) if rows else []
    batches = [[rows[index] for index in batch] for batch in indices]
    return advantages.update_result(metrics, rows), batches + [[] for _ in range(updates - len(batches))]


def mini_batch(
    config: AstunerConfig,
    algorithm: Algorithm,
    rows: Sequence[TrainingRow],
    episodes: Sequence[Episode],
    by_key: Mapping[SampleKey, Experience],
) -> list[Experience]:
    """Return a mini-batch's experiences that have a gradient, with the loss inputs set."""
    if not rows or not has_gradient(config, rows):
        return []
    scales = row_scales(rows, algorithm.loss_agg_mode, config.data.max_response_length).tolist()
    use_reference = uses_kl_loss(config)
    trains_all = trains_without_advantage(config)
    trained = [(row, scale) for row, scale in zip(rows, scales, strict=True) if trains_all or row.has_advantage]
    batch = []
    for row, scale in trained:
        episode = episodes[row.episode]
        start = prompt_length(episode.samples[row.sample])
        versions = {call.call_id: call.policy_version for call in episode.calls}
        exp = by_key[episode.episode_id, row.sample]
        exp.advantages = token_advantages([row], len(row.token_ids))[0, start:]
        exp.info |= {
            # Relative to the response, like the trainer's tensors.
            CALLS: [
                (begin - start, end - start, max(exp.info[STEP] - 1 - versions[call_id], 0))
                for (begin, end), call_id in zip(row.calls, row.call_ids, strict=True)
            ],
            COUNTS: list(row.train_counts[start:]),
            # The scales are those of the whole mini-batch; this undoes the trainer's mean over experiences.
            SCALE: [scale * len(trained)],
            MINI_BATCH_SIZE: len(trained),
        }
        batch.append(_with_loss_inputs(exp, use_reference=use_reference))
    return batch


def padding_experience(step: int, template: Experience, *, use_reference: bool) -> Experience:
    """Return an experience without gradient, with the additional `info` of `template`.

    It fills mini-batches without a gradient, so that trainer and explorer count the same steps.
    """
    exp = empty_experience(step)
    exp.advantages = torch.zeros(1)
    exp.info |= {key: template.info[key] for key in template.info.keys() - exp.info.keys()}
    exp.info |= {CALLS: [(0, 0, 0)], COUNTS: [0], SCALE: [0.0], MINI_BATCH_SIZE: 1}
    return _with_loss_inputs(exp, use_reference=use_reference)


def _with_loss_inputs(exp: Experience, *, use_reference: bool) -> Experience:
    exp.custom_fields = list(_FIELDS)
    if not use_reference:
        exp.info[REFERENCE] = [0.0] * len(exp.action_mask)
        exp.custom_fields.append(_ZERO_REFERENCE)
    return exp
