"""Classes that Trinity's trainer loads by name: algorithm type, sample strategy, policy loss and monitor."""

from __future__ import annotations

import asyncio
from typing import Any

import torch
from torch import Tensor
from trinity.algorithm.algorithm import AlgorithmType
from trinity.algorithm.entropy_loss_fn.entropy_loss_fn import EntropyLossFn
from trinity.algorithm.policy_loss_fn import PolicyLossFn
from trinity.algorithm.sample_strategy.sample_strategy import SampleStrategy
from trinity.buffer import get_buffer_reader
from trinity.common.experience import Experience
from trinity.utils.monitor import Monitor
from trinity.utils.timer import Timer

from astuner.algorithms.aggregate import token_weights
from astuner.algorithms.correction import CORRECTION_SUMS, Correction, micro_batch_loss
from astuner.algorithms.kl import token_kl
from astuner.algorithms.policy_batch import CallTable, PolicyBatch
from astuner.algorithms.registry import resolve
from astuner.backbone.trinity.advantage_fn import EPISODE, MINI_BATCH_SIZE, SAMPLE
from astuner.backbone.trinity.coordinator import BatchConsumed, MetricsLogged, coordinator
from astuner.backbone.trinity.metrics import content_digest
from astuner.config.algorithm_settings import AlgorithmConfig, KlType
from astuner.config.corrections import CorrectionConfig


class WithReference(AlgorithmType):
    """Algorithm type with which the trainer computes reference logprobs, for the KL term of the loss."""

    use_critic = False
    use_reference = True
    compute_advantage_in_trainer = False
    can_balance_batch = True
    schema = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return no defaults; astuner sets all keys."""
        return {}


class WithoutReference(WithReference):
    """Algorithm type without reference logprobs; experiences contain zeros instead."""

    use_reference = False


class MiniBatchStrategy(SampleStrategy):
    """Reads one whole mini-batch per trainer step, in the order in which they were written (`sample_strategy`).

    Trinity's strategies read a fixed number of experiences. Episodes have varying numbers of them, so that a step could
    wait forever, split an episode, or leave a growing backlog.
    """

    def __init__(self, buffer_config: Any, updates: int, **_: Any) -> None:
        """Open the experience buffer; a training step has `updates` optimizer steps."""
        super().__init__(buffer_config)
        self._updates = updates
        self._ended: asyncio.Future[None] | None = None
        self._reader = get_buffer_reader(buffer_config.trainer_input.experience_buffer)

    async def sample(self, step: int, **_: Any) -> tuple[list[Experience], dict[str, float], list[Any]]:
        """Return a mini-batch, its metrics (read time and staleness in training steps), and no rows to display.

        Raises:
            StopAsyncIteration: the training ends before the training step of this trainer step. Then Trinity's trainer
                saves a checkpoint and stops.
        """
        metrics: dict[str, float] = {}
        with Timer(metrics, "time/read_experience"):
            exps = await self._read_unless_ended(step)
        digests = {
            (exp.info[EPISODE], exp.info[SAMPLE]): content_digest(
                exp.tokens.tolist(), exp.action_mask.tolist(), exp.logprobs.tolist()
            )
            for exp in exps
            if exp.action_mask.any()
        }
        if not await coordinator().start_update.remote(BatchConsumed(step, digests)):
            raise StopAsyncIteration
        current = (step - 1) // self._updates
        staleness = [current - max(exp.info["model_version"], 0) // self._updates for exp in exps]
        metrics |= {"staleness/max": float(max(staleness)), "staleness/mean": sum(staleness) / len(staleness)}
        return exps, metrics, []

    async def _read_unless_ended(self, step: int) -> list[Experience]:
        """Wait for a trainer step's mini-batch, or until training ends before it."""
        if self._ended is None:
            self._ended = asyncio.ensure_future(coordinator().wait_until_ended.remote())
        reading = asyncio.ensure_future(self._read())
        await asyncio.wait((reading, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done() and not await coordinator().may_update.remote(step):
            reading.cancel()
            raise StopAsyncIteration
        return await reading

    async def _read(self) -> list[Experience]:
        exps: list[Experience] = await self._reader.read(batch_size=1)
        if exps[0].info[MINI_BATCH_SIZE] > 1:
            exps += await self._reader.read(batch_size=exps[0].info[MINI_BATCH_SIZE] - 1)
        return exps

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no arguments."""
        return {}

    def state_dict(self) -> dict[str, Any]:
        """Return no state: a resumed run samples untrained batches again."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Do nothing: `state_dict` returns no state."""


class EpisodeLoss(PolicyLossFn):
    """The policy loss that all backbones share (`policy_loss_fn`).

    Trinity's losses weight experiences equally. Here each experience has a scale (`row_scale`) computed over the whole
    mini-batch, so that an episode's weight does not depend on its number of timelines. A call computes part of a
    mini-batch's loss: one experience with Tinker's trainer, a micro-batch with verl's.
    """

    def __init__(
        self,
        backend: str,
        algorithm: dict[str, Any],
        kl_coef: float,
        kl_type: KlType,
        correction: dict[str, Any],
        *,
        old_from_trainer: bool,
        ages: int,
    ) -> None:
        """Resolve the algorithm.

        Args:
            backend: Trinity's trainer type, `tinker` or `verl`.
            kl_coef: coefficient of the KL to the reference model; 0 for no KL term.
            correction: the run's `trainer_common.correction`, resolved.
            old_from_trainer: whether the ratios are to the policy before the update. A training step then has one
                optimizer step, so it is the current policy.
            ages: the number of values of the calls' staleness with metrics of their own; 0 for none.
        """
        super().__init__(backend=backend)
        rule = resolve(AlgorithmConfig(**algorithm)).rule
        assert rule is not None
        self._rule, self._kl_coef, self._kl_type = rule, kl_coef, kl_type
        self._correction, self._ages = Correction(CorrectionConfig(**correction), old_from_trainer), ages

    def __call__(
        self,
        logprob: Tensor,
        old_logprob: Tensor,
        advantages: Tensor,
        ref_logprob: Tensor,
        token_counts: Tensor,
        row_scale: Tensor,
        call_spans: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the loss and metrics, which are sums over tokens.

        Args:
            logprob, old_logprob, advantages, ref_logprob: [B, R] floats for the response tokens, padded with 0; or [R]
                for one row. The old logprobs are the sampler's.
            token_counts: [B, R] int64, how often each token is trained; or [R].
            row_scale: [B, 1] float32; or [1].
            call_spans: [B, C, 3] int64, start and end of each call's completion and its staleness in training steps,
                padded with zeros; or [C, 3].
        """
        counts = _as_batch(token_counts)
        current, sampler, credit = (_as_batch(tensor).float() for tensor in (logprob, old_logprob, advantages))
        spans = call_spans.view(len(counts), -1, 3)
        rows, calls = (spans[..., 1] > spans[..., 0]).nonzero(as_tuple=True)
        starts, ends, staleness = spans[rows, calls].unbind(-1)
        table = CallTable(rows, starts, ends)
        old = current.detach() if self._correction.old_from_trainer else sampler
        batch = PolicyBatch(current, old, credit, counts, table, sampler)
        loss, sums = micro_batch_loss(
            self._rule,
            self._correction,
            batch,
            token_weights(counts, row_scale.flatten()),
            kl=token_kl(current, _as_batch(ref_logprob).float(), self._kl_type) if self._kl_coef > 0 else None,
            kl_coef=self._kl_coef,
        )
        sums["logprob_difference"] = ((current.detach() - sampler).abs() * counts).sum()
        # All calls return the same names, because the trainer averages each over the calls that return it.
        for age, metrics in enumerate(self._correction.metrics_by_staleness(batch, staleness, self._ages)):
            sums |= {f"correction/stale_{age}/{name}": getattr(metrics, name) for name in CORRECTION_SUMS}
        return loss, {name: self._metric(name, float(value)) for name, value in sums.items()}

    def _metric(self, name: str, value: float) -> Any:
        """Return a sum, or a maximum if its name ends with `_max`, in the trainer's format.

        Both trainers would average plain numbers over the calls of the loss.
        """
        is_maximum = name.endswith("_max")
        if self.backend != "verl":
            return _Maximum(value) if is_maximum else value
        return _verl_metric(value, is_maximum=is_maximum)

    @classmethod
    def default_args(cls) -> dict[str, Any]:
        """Return no defaults; astuner sets all arguments."""
        return {}


class EntropyBonus(EntropyLossFn):
    """The entropy bonus, with the same weights of tokens as `EpisodeLoss` (`entropy_loss_fn`), for verl's trainer.

    The entropies of Trinity's Tinker trainer are those of the sampled tokens only.
    """

    def __init__(self, entropy_coef: float) -> None:
        """Set the coefficient of the bonus."""
        self._coef = entropy_coef

    def __call__(
        self, entropy: Tensor, action_mask: Tensor, *, token_counts: Tensor, row_scale: Tensor, **_: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the bonus, which Trinity subtracts from the loss, and metrics: sums over tokens.

        Args:
            entropy: [B, R] float.
            action_mask: [B, R] bool, not used.
            token_counts: [B, R] int64, how often each token is trained.
            row_scale: [B, 1] float32.
        """
        entropies = torch.where(token_counts > 0, entropy.float(), 0.0)
        bonus = self._coef * (entropies * token_weights(token_counts, row_scale.flatten())).sum()
        sums = {"entropy": (entropies * token_counts).sum(), "loss/entropy_bonus": bonus}
        return bonus, {name: _verl_metric(float(value.detach())) for name, value in sums.items()}


def _verl_metric(value: float, *, is_maximum: bool = False) -> Any:
    """Return a value that verl adds over micro-batches and workers, or takes the maximum of."""
    from verl.utils.metric import AggregationType, Metric

    return Metric(AggregationType.MAX if is_maximum else AggregationType.SUM, value)


class _Maximum(float):
    """A number whose mean with others is the largest: Trinity's Tinker trainer computes `sum(values) / len(values)`."""

    def __add__(self, other: float) -> _Maximum:
        return _Maximum(max(self, other))

    def __radd__(self, other: float) -> _Maximum:
        return self  # `sum` starts with 0

    def __truediv__(self, count: float) -> float:
        return float(self)


def _as_batch(values: Tensor) -> Tensor:
    return values if values.dim() > 1 else values[None]


class CoordinatorMonitor(Monitor):
    """Sends the metrics of Trinity's trainer and explorer to the launcher (`monitor_type`)."""

    def __init__(self, project: str, group: str, name: str, role: str, config: Any = None) -> None:
        super().__init__(project, name, role, config)
        self._coordinator = coordinator()

    def log(self, data: dict[str, Any], step: int, commit: bool = False) -> None:
        """Send the numeric metrics of a step."""
        metrics = {name: float(value) for name, value in data.items() if isinstance(value, int | float)}
        self._coordinator.post_event.remote(MetricsLogged(self.role, step, metrics))

    def close(self) -> None:
        """Do nothing: metrics are sent when they are logged."""
