"""Computes the update of a training step again from the record and a checkpoint, and compares it with the record."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from astuner.algorithms.credit_assignment import UpdateResult
from astuner.algorithms.registry import resolve
from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.local.backbone import deterministic_operations, read_state, reported_memory_errors
from astuner.backbone.local.policy import Optimizer, Policy
from astuner.backbone.local.update import PolicyUpdate
from astuner.backbone.training.checkpoints import complete_checkpoints
from astuner.backbone.training.run_inputs import model_path
from astuner.config.loading import load_config
from astuner.config.root import AstunerConfig
from astuner.errors import LogprobGapError, ModelError, PluginError, RecordError
from astuner.llm_engine.causal_lm import choose_device
from astuner.run_record.episode_file import RecordedEpisode, read_recorded_episode
from astuner.run_record.episodes import read_index
from astuner.run_record.metrics import read_metrics
from astuner.run_record.recorded_run import search_folders_of
from astuner.run_record.updates import by_token
from astuner.schema import Episode

# Of runs that are not deterministic: (absolute, relative). Sums have another order, which Adam's division amplifies.
_TOLERANCES = {torch.float32: (1e-4, 1e-3), torch.bfloat16: (5e-2, 5e-2)}
# A token whose logprobs of sampler and trainer differ by more was not sampled with these weights, nats.
_MAX_TOKEN_GAP = {torch.float32: 1e-2, torch.bfloat16: 1.0}
_SHOWN_METRICS = ("lr", "loss/policy", "loss/kl", "loss/total", "grad_norm")
_THREADS = "update/cpu_threads"  # those of the replay
_MAX_STEPS_NAMED = 10
_MAX_DIFFERENCES_SHOWN = 10


@dataclass(frozen=True)
class ReplayedMetric:
    """A metric of the update.

    Attributes:
        recorded, replayed: its values in the record and in the new computation.
        agrees: whether they are equal, within the tolerance.
    """

    name: str
    recorded: float | None
    replayed: float
    agrees: bool


@dataclass(frozen=True)
class StepReplay:
    """The comparison of a step's update with the record.

    Attributes:
        checkpoint: the step of the checkpoint from which the update started; 0 for the starting model.
        is_exact: whether equal bits are required, because the run was deterministic.
        differences: what differs in the order of computation; the first is the cause of the others.
    """

    step: int
    checkpoint: int
    is_exact: bool
    metrics: tuple[ReplayedMetric, ...]
    differences: tuple[str, ...]

    @property
    def agrees(self) -> bool:
        """Whether nothing differs."""
        return not self.differences

    def lines(self) -> Iterator[str]:
        """Yield the lines of the report."""
        start = f"the checkpoint of step {self.checkpoint}" if self.checkpoint else "the starting model"
        between = self.step - self.checkpoint - 1
        more = f" and {between} further update{'s' * (between > 1)} from the record" if between else ""
        yield f"step {self.step}, computed again from {start}{more}:"
        for metric in self.metrics:
            if metric.name in _SHOWN_METRICS:
                state = "agrees" if metric.agrees else "differs"
                yield f"  {metric.name}: recorded {metric.recorded!r}, computed {metric.replayed!r}: {state}"
        if self.agrees:
            yield "the record agrees" + (" to the last bit" if self.is_exact else " within rounding")
        else:
            yield f"first difference: {self.differences[0]}"
            yield from (f"then: {text}" for text in self.differences[1:_MAX_DIFFERENCES_SHOWN])
            if len(self.differences) > _MAX_DIFFERENCES_SHOWN:
                yield f"and {len(self.differences) - _MAX_DIFFERENCES_SHOWN} more (--json lists all)"


def replay_step(folder: Path, step: int) -> StepReplay:
    """Compute the update of training step `step` again, from the newest checkpoint before it.

    Updates between the checkpoint and the step are repeated first. Nothing is sampled, and the run's folder is not
    changed.

    Raises:
        RecordError: the record or the checkpoints lack what is needed. The error names the steps that can be computed.
    """
    config = load_config(folder / "config.yaml").config.astuner
    algorithm = config.trainer_common.algorithm
    if config.backbone != "local" or resolve(algorithm).rule is None:
        raise RecordError(
            f"{folder} is a run of backbone {config.backbone} with algorithm {algorithm.adv_estimator}; replay "
            "computes the reinforcement learning updates of the local backbone"
        )
    record = _TrainingRecord(folder)
    record.check(step)
    saved = {int(path.name.rpartition("_")[2]): path for path in complete_checkpoints(folder / "checkpoints")}
    start = max((number for number in saved if number < step), default=0)
    threads = torch.get_num_threads()
    with reported_memory_errors(config), contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, threads)
        device = choose_device(config.trainer_common.device)
        if config.trainer_common.deterministic:
            stack.enter_context(deterministic_operations(device))
        torch.manual_seed(config.trainer_common.seed)
        # Not in the run's folder, whose subfolder `model` is the tuned model.
        search = (*search_folders_of(folder), Path.cwd())
        path = next((match for parent in search if (match := parent / config.model.path).exists()), config.model.path)
        try:
            policy = Policy(config.model, model_path(str(path), "model.path", search), device, config.update.pack)
        except (ModelError, PluginError) as error:
            raise RecordError(f"{folder} cannot be computed again without its starting model: {error}") from error
        states = {number: read_state(saved[number], device) for number in (start, step) if number in saved}
        total_steps = next(
            (state["total_steps"] for state in states.values() if "total_steps" in state), record.last_step
        )
        optimizer = Optimizer(policy.trainable(), config.trainer_common.optim, total_steps)
        if start:
            policy.load_training_state(states[start]["trained"])
            optimizer.load(states[start]["optimiser"])
        update = PolicyUpdate(config, resolve(config.trainer_common.algorithm), policy, optimizer)
        for number in range(start + 1, step + 1):
            torch.set_num_threads(int(record.metrics.get(number, {}).get(_THREADS) or threads))
            comparison = _Comparison(
                config, policy.dtype, record.metrics.get(number, {}), record.episodes(number), number
            )
            comparison.run(policy, update)
            if comparison.differences:
                break
        if not comparison.differences and step in states:
            comparison.compare_weights(policy.training_state(), states[step]["trained"])
    differences = [f"step {number}: {text}" for text in comparison.differences]
    return StepReplay(step, start, comparison.is_exact, tuple(comparison.metrics), tuple(differences))


class _TrainingRecord:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._entries = [entry for entry in read_index(folder) if entry.split == "train" and entry.status == "ok"]
        self.metrics: dict[int, dict[str, float | None]] = {}
        for row in read_metrics(folder):
            self.metrics.setdefault(row.step, {}).update(row.metrics)

    @property
    def last_step(self) -> int:
        """The last recorded step."""
        return max(self.metrics, default=0)

    def check(self, step: int) -> None:
        """Raise RecordError if the record lacks the update of a step."""
        updates = sorted(number for number, metrics in self.metrics.items() if "grad_norm" in metrics)
        if step not in updates:
            named = ", ".join(map(str, updates[:_MAX_STEPS_NAMED])) + (", …" if len(updates) > _MAX_STEPS_NAMED else "")
            raise RecordError(
                f"{self._folder} has no update of step {step}; "
                + (f"these steps can be computed again: {named}" if updates else "no step of it had an update")
            )

    def episodes(self, step: int) -> list[RecordedEpisode]:
        """Return the episodes that a step trained on; raise RecordError if one, or its tokens, is not in the record."""
        recorded = [read_recorded_episode(self._folder / entry.path) for entry in self._entries if entry.step == step]
        for each in recorded:
            if each.withheld is not None:
                raise RecordError(
                    f"step {step} cannot be computed again: the record lacks the tokens of {each.episode.episode_id} "
                    f"({each.withheld}). Steps up to {step - 1} can, if the record has their tokens"
                )
        return recorded


@dataclass(frozen=True)
class _RecordedTeacher:
    """Gives rows the advantages of their tokens that were recorded, which include those from the teacher."""

    recorded: Sequence[RecordedEpisode]

    def assign_to(
        self, rows: Sequence[TrainingRow], episodes: Sequence[Episode]
    ) -> tuple[list[TrainingRow], dict[str, float]]:
        """Return the rows with the recorded advantages, and no metrics: those of the teacher are not computed again."""
        assigned = []
        for row in rows:
            each = self.recorded[row.episode]
            by_index = by_token(each.episode.samples[row.sample], each.updates[row.sample])[0]
            total = np.array([value or 0.0 for value in by_index], np.float32)
            # The recorded sums replace the advantages of the calls, so that no rounding separates the two.
            assigned.append(replace(row, advantages=[0.0] * len(row.calls), teacher_advantages=total))
        return assigned, {}


@dataclass
class _Comparison:
    config: AstunerConfig
    dtype: torch.dtype
    recorded_metrics: Mapping[str, float | None]
    recorded: Sequence[RecordedEpisode]
    step: int
    metrics: list[ReplayedMetric] = field(default_factory=list, init=False)
    differences: list[str] = field(default_factory=list, init=False)

    @property
    def is_exact(self) -> bool:
        """Whether the run was deterministic."""
        return self.config.trainer_common.deterministic

    def run(self, policy: Policy, update: PolicyUpdate) -> None:
        """Compute the update, which changes the weights, and compare it."""
        policy.prepare_update()
        # Find the first token of each sample that was not sampled with the weights before the update.
        computed = update.trainer_logprobs([each.episode for each in self.recorded])
        for (episode, index), logprobs in computed.items():
            sample = self.recorded[episode].episode.samples[index]
            for position, (count, sampled) in enumerate(zip(sample.train_counts, sample.logprobs, strict=True)):
                if count and not abs(sampled - logprobs[position]) <= _MAX_TOKEN_GAP[self.dtype]:
                    self.differences.append(
                        f"logprob of {_token(self.recorded[episode], index + 1, position)}: the engine recorded "
                        f"{sampled!r}, the trainer computes {logprobs[position]!r}"
                    )
                    break
        if self.config.trainer_common.distillation.teacher is not None:
            update.distiller = _RecordedTeacher(self.recorded)
        try:
            result = update.step([each.episode for each in self.recorded], self.step)
        except LogprobGapError as error:
            self.differences.append(error.text.removeprefix(f"step {self.step}: "))
            return
        # The second of several mini-batches depends on the learning rate, so it is compared before its logprobs.
        self._compare_metrics({name: value for name, value in result.metrics.items() if name == "lr"})
        self._compare_samples(result)
        self._compare_metrics({name: value for name, value in result.metrics.items() if name != "lr"})

    def _compare_metrics(self, computed: Mapping[str, float]) -> None:
        for name, value in computed.items():
            recorded = self.recorded_metrics.get(name)
            agrees = name == _THREADS or (recorded is not None and self._agree(recorded, value))
            self.metrics.append(ReplayedMetric(name, recorded, value, agrees))
            if not agrees:
                self.differences.append(f"{name}: recorded {recorded!r}, computed {value!r}")

    def compare_weights(self, computed: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> None:
        """Compare the weights after the update with those of the step's checkpoint."""
        for name, value in saved.items():
            gap = float((computed[name].float() - value.float()).abs().max()) if value.numel() else 0.0
            if not self._agree(gap, 0.0):
                self.differences.append(f"weight {name} of the checkpoint: differs by up to {gap:.3g}")

    def _agree(self, recorded: float, computed: float) -> bool:
        absolute, relative = (0.0, 0.0) if self.is_exact else _TOLERANCES[self.dtype]
        return recorded == computed or math.isclose(recorded, computed, rel_tol=relative, abs_tol=absolute)

    def _compare_samples(self, result: UpdateResult) -> None:
        for each, advantage in zip(self.recorded, result.advantages, strict=True):
            recorded = each.labels.advantage
            if recorded is None or not self._agree(recorded, advantage):
                self.differences.append(
                    f"advantage of episode {each.episode.episode_id}: recorded {recorded!r}, computed from the "
                    f"recorded rewards {advantage!r}"
                )
        columns: tuple[tuple[int, str], ...] = ((0, "advantage"), (1, "trainer's logprob"))
        for column, name in columns:
            for each, updates in zip(self.recorded, result.samples, strict=True):
                samples = zip(each.episode.samples, each.updates, updates, strict=False)
                for number, (sample, old, new) in enumerate(samples, 1):
                    pairs = zip(by_token(sample, old)[column], by_token(sample, new)[column], strict=True)
                    for position, (a, b) in enumerate(pairs):
                        if (a is None) != (b is None) or (a is not None and b is not None and not self._agree(a, b)):
                            self.differences.append(
                                f"{name} of {_token(each, number, position)}: recorded {a!r}, computed {b!r}"
                            )
                            break


def _token(recorded: RecordedEpisode, sample: int, position: int) -> str:
    return f"token {position} of sample {sample} of episode {recorded.episode.episode_id}"
