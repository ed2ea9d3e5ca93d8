"""Train with samplers that differ from the trainer, without and with each correction, and compare the rewards.

The job is the one of `bench_regressions`: a random model of 50,000 weights learns to answer with letters. The trainer
computes in float32. The samplers compute in float32 or bfloat16, have weights rounded to 8 or 4 bits in each row, or
weights that are two steps old. The campaign turns off the checks that stop a run whose engine has other weights.
Results are kept in FOLDER, so that an interrupted campaign continues. Writes `results.json` and `results.png` there,
and prints one line of JSON.

    python -m campaigns.sampler_gaps FOLDER [--seeds 5] [--samplers fp32,int8] [--modes none,token_tis]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from loguru import logger
from torch import Tensor

from astuner import AstunerJob
from astuner.config.corrections import CORRECTIONS
from astuner.run_record import read_metrics
from astuner.run_record.recorded_run import RecordedRun
from campaigns.bench_regressions import create_inputs

_TITLES = {
    "fp32": "float32",
    "bf16": "bfloat16",
    "int8": "8-bit weights",
    "int4": "4-bit weights",
    "stale": "two steps old",
}
_GAP = "correction/gap_mean"
_AGENT = f"{Path(__file__).parent / 'agents.py'}->Letters"
_STEPS = 30
_LR = 6e-2
_STALENESS = 2


def rounded(weights: Mapping[str, Tensor], bits: int) -> dict[str, Tensor]:
    """Return weights whose matrices are rounded to integers of `bits` bits, times a scale for each row."""
    largest = 2 ** (bits - 1) - 1
    result = {}
    for name, weight in weights.items():
        if weight.dim() < 2:
            result[name] = weight
            continue
        scale = weight.abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / largest
        result[name] = (weight / scale).round() * scale
    return result


def use_sampler(sampler: str) -> None:
    """Give the engine of the local backbone the weights or the dtype of a sampler."""
    from astuner.algorithms import credit_assignment
    from astuner.backbone.local.backbone import LocalSession
    from astuner.llm_engine.embedded.engine import EmbeddedEngine

    for check in ("_compare_weights", "_compare_logprobs"):
        setattr(LocalSession, check, lambda *_: None)
    credit_assignment.MAX_LOGPROB_DIFFERENCE = dict.fromkeys(credit_assignment.MAX_LOGPROB_DIFFERENCE, math.inf)
    update_weights, start = EmbeddedEngine.update_weights, EmbeddedEngine.__init__
    earlier: list[Mapping[str, Tensor]] = []

    def start_in_bfloat16(self: EmbeddedEngine, model: Any, **options: Any) -> None:
        start(self, model.to(torch.bfloat16), **options)

    def update_with_changed(self: EmbeddedEngine, state_dict: Mapping[str, Tensor], policy_version: int) -> None:
        earlier.append({name: tensor.clone() for name, tensor in state_dict.items()})
        del earlier[: -_STALENESS - 1]
        if policy_version == _STEPS:  # the validation after training is that of the trained weights
            changed = state_dict
        elif sampler == "stale":
            changed = earlier[0]
        else:
            changed = rounded(state_dict, int(sampler.removeprefix("int")))
        update_weights(self, changed, policy_version)

    if sampler == "bf16":
        EmbeddedEngine.__init__ = start_in_bfloat16  # type: ignore[method-assign]
    elif sampler != "fp32":
        EmbeddedEngine.update_weights = update_with_changed  # type: ignore[method-assign]


def train(folder: Path, name: str, sampler: str, mode: str, seed: int) -> None:
    """Do one run."""
    torch.set_num_threads(1)
    job = AstunerJob(algorithm="grpo", backbone="local", model=folder / "model", experiment_name=name)
    job.configure(
        {
            "rollout.agentscope_workflow": _AGENT,
            "rollout.num_repeat": 8,
            "rollout.temperature": 1.0,
            "rollout.max_response_length_in_one_turn": 16,
            "rollout.max_model_len": 256,
            "rollout.compute_madness_checklist": [],
            "data.train_batch_size": 4,
            "trainer_common.total_training_steps": _STEPS,
            "trainer_common.mini_batch_num": 2,
            "trainer_common.use_kl_loss": False,
            "trainer_common.val_before_train": False,
            "trainer_common.test_freq": 1000,
            "trainer_common.save_freq": 1000,
            "trainer_common.logger": ["console"],
            "trainer_common.seed": seed,
            "trainer_common.optim.lr": _LR,
            "trainer_common.correction.mode": mode,
            "trainer_common.correction.old_logprobs": "trainer",
        }
    )
    job.set_data("file", folder / "training.jsonl", validation_path=folder / "validation.jsonl")
    use_sampler(sampler)
    job.tune(folder / "records")


def _child(*arguments: Any) -> None:
    logger.remove()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        train(*arguments)
    os._exit(0)


def run(folder: Path, sampler: str, mode: str, seed: int) -> None:
    """Do one run in a forked process, which inherits the imports. A finished run is skipped."""
    name = f"{sampler}-{mode}-{seed}"
    if RecordedRun(folder / "records" / name).summary is None:
        process = multiprocessing.get_context("fork").Process(target=_child, args=(folder, name, sampler, mode, seed))
        process.start()
        process.join()
        print(f"{name}: exit code {process.exitcode}", file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True)
class Curves:
    """The runs of a sampler with a correction.

    Attributes:
        rewards: the mean reward of each step, [seeds][steps].
        after: the mean reward of the validation of the trained weights, [seeds].
        gaps: the mean difference of the logprobs of sampler and trainer over a run, in nats, [seeds].
    """

    rewards: list[list[float]]
    after: list[float]
    gaps: list[float]

    @classmethod
    def read(cls, folder: Path, sampler: str, mode: str, seeds: Sequence[int]) -> Curves:
        """Read the records of the runs."""
        curves = cls([], [], [])
        for seed in seeds:
            rows = [row.metrics for row in read_metrics(folder / "records" / f"{sampler}-{mode}-{seed}")]
            curves.rewards.append([row["reward/mean"] for row in rows if "reward/mean" in row])
            curves.after.append(next(row["val/reward"] for row in reversed(rows) if "val/reward" in row))
            curves.gaps.append(statistics.fmean(row[_GAP] for row in rows if _GAP in row))
        return curves

    def summary(self) -> dict[str, float]:
        """Return the means over seeds, and the standard errors of the rewards."""
        means = [statistics.fmean(rewards) for rewards in self.rewards]
        return {
            "gap": round(statistics.fmean(self.gaps), 5),
            "mean_reward": round(statistics.fmean(means), 4),
            "mean_reward_error": round(_standard_error(means), 4),
            "after": round(statistics.fmean(self.after), 4),
            "after_error": round(_standard_error(self.after), 4),
            "worst_after": round(min(self.after), 4),
        }


def _standard_error(values: Sequence[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


def draw(results: Mapping[str, Mapping[str, Curves]], path: Path) -> None:
    """Draw the mean reward by step, with a panel for each sampler."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.1 * len(results), 3.4), layout="constrained")
    axes = figure.subplots(1, len(results), sharey=True, squeeze=False)[0]
    for axis, (sampler, by_mode) in zip(axes, results.items(), strict=True):
        for index, (mode, curves) in enumerate(by_mode.items()):
            means = [statistics.fmean(values) for values in zip(*curves.rewards, strict=True)]
            style = {"color": f"C{index % 10}", "linestyle": "--" if index >= 10 else "-", "linewidth": 1.1}
            if mode == "none":
                style |= {"color": "#0f172a", "linewidth": 2.2}
            axis.plot(range(1, len(means) + 1), means, label=mode, **style)
        axis.set_title(_TITLES[sampler], fontsize=10)
        axis.set_xlabel("step")
        axis.grid(color="#e2e8f0")
    axes[0].set_ylabel("mean reward")
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=7, fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--samplers", default=",".join(_TITLES))
    parser.add_argument("--modes", default=",".join(CORRECTIONS))
    options = parser.parse_args()
    folder, seeds = options.folder.absolute(), range(1, options.seeds + 1)
    samplers, modes = options.samplers.split(","), options.modes.split(",")
    create_inputs(folder)
    # Forked processes have the imports already.
    for module in ("agentscope", "transformers", "astuner.backbone.local.backbone", "astuner.run_record.plots"):
        importlib.import_module(module)
    for seed, sampler, mode in itertools.product(seeds, samplers, modes):
        run(folder, sampler, mode, seed)
    results = {sampler: {mode: Curves.read(folder, sampler, mode, seeds) for mode in modes} for sampler in samplers}
    report = {sampler: {mode: made.summary() for mode, made in by_mode.items()} for sampler, by_mode in results.items()}
    (folder / "results.json").write_text(json.dumps(report, indent=2) + "\n")
    draw(results, folder / "results.png")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
