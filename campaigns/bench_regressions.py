"""Check that `astuner bench compare` finds injected regressions, and none between equal versions.

The job is small: a random model of 50,000 weights learns to answer with letters, in 12 steps of 4 tasks × 8 episodes,
validated on 60 tasks every 3 steps. Pairs of equal versions differ in their seeds only. The regressions are advantages
with the wrong sign and half the learning rate. Results are kept in FOLDER, so that an interrupted campaign continues.
Prints one line of JSON, and exits with 1 if a pair raised an alarm or a regression was missed.

    python -m campaigns.bench_regressions FOLDER [--pairs 10] [--seeds 5] [--parallel 2]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from loguru import logger

from astuner import AstunerJob
from astuner.analysis.benchmark.comparison import ResultComparison, compare_results
from astuner.analysis.benchmark.results import BenchResult, result_of, write_result
from astuner.analysis.benchmark.suite import SuiteEntry
from astuner.run_record.recorded_run import RecordedRun

_AGENT = f"{Path(__file__).parent / 'agents.py'}->Letters"
_LR = 1.5e-2


def wrong_sign() -> None:
    """Train with the negative of each advantage."""
    from dataclasses import replace

    from astuner.backbone.local import update

    compute = update.step_advantages

    def negated(*arguments: object) -> object:
        result = compute(*arguments)  # type: ignore[arg-type]
        return replace(result, advantages=-result.advantages)

    update.step_advantages = negated  # type: ignore[assignment]


VARIANTS: dict[str, tuple[float, Callable[[], None]]] = {
    "equal": (_LR, lambda: None),
    "wrong_sign": (_LR, wrong_sign),
    "half_lr": (_LR / 2, lambda: None),
}


def create_inputs(folder: Path) -> None:
    """Write the model and the tasks."""
    from tests.conftest import conversation, saved_model
    from tutorial.tiny_tokenizer import build_tokenizer

    if (folder / "validation.jsonl").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    saved_model(build_tokenizer([conversation(rng) for _ in range(50)], context=512), folder / "model",
                hidden_size=32, head_dim=16)  # fmt: skip
    for split, count in (("training", 48), ("validation", 60)):
        rows = [{"question": f"{split} {number}", "answer": ""} for number in range(count)]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def train(folder: Path, variant: str, seed: int) -> None:
    """Do one run."""
    import torch

    torch.set_num_threads(1)
    lr, inject = VARIANTS[variant]
    job = AstunerJob(algorithm="grpo", backbone="local", model=folder / "model", experiment_name=f"{variant}-{seed}")
    job.configure(
        {
            "rollout.agentscope_workflow": _AGENT,
            "rollout.num_repeat": 8,
            "rollout.temperature": 1.0,
            "rollout.max_response_length_in_one_turn": 8,
            "rollout.max_model_len": 256,
            "rollout.compute_madness_checklist": [],
            "rollout.val_kwargs.temperature": 1.0,
            "rollout.val_kwargs.do_sample": True,
            "data.train_batch_size": 4,
            "trainer_common.total_training_steps": 12,
            "trainer_common.use_kl_loss": False,
            "trainer_common.val_before_train": True,
            "trainer_common.val_pass_n": 1,
            "trainer_common.test_freq": 3,
            "trainer_common.save_freq": 1000,
            "trainer_common.logger": ["console"],
            "trainer_common.seed": seed,
            "trainer_common.optim.lr": lr,
        }
    )
    job.set_data("file", folder / "training.jsonl", validation_path=folder / "validation.jsonl")
    inject()
    job.tune(folder / "records")


def _child(folder: Path, variant: str, seed: int) -> None:
    logger.remove()
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere), contextlib.redirect_stdout(nowhere):
        train(folder, variant, seed)
    os._exit(0)


def run(folder: Path, variant: str, seed: int) -> None:
    """Do one run in a forked process, which inherits the imports. A finished run is skipped."""
    if RecordedRun(folder / f"records/{variant}-{seed}").summary is None:
        process = multiprocessing.get_context("fork").Process(target=_child, args=(folder, variant, seed))
        process.start()
        process.join()
        print(f"{variant} {seed}: exit code {process.exitcode}", file=sys.stderr, flush=True)


def result(folder: Path, variant: str, seeds: range) -> BenchResult:
    """Return the result of a variant with these seeds."""
    records = {seed: folder / f"records/{variant}-{seed}" for seed in seeds}
    entry = SuiteEntry(name="letters", conf="letters.yaml", seeds=tuple(seeds))
    made = result_of(entry, "local", records)
    assert made is not None
    write_result(folder / f"results/{variant}-{seeds.start}", made)
    return made


def comparisons(a: BenchResult, b: BenchResult) -> Iterator[ResultComparison]:
    """Yield the comparisons of two results."""
    yield from compare_results([a], [b]).rows


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--parallel", type=int, default=2)
    options = parser.parse_args()
    folder, count = options.folder.absolute(), options.seeds
    create_inputs(folder)
    # Forked processes have the imports already.
    for module in ("agentscope", "transformers", "astuner.backbone.local.backbone", "astuner.run_record.plots"):
        importlib.import_module(module)
    groups = [range(1 + count * number, 1 + count * (number + 1)) for number in range(2 * options.pairs)]
    runs = [("equal", seed) for group in groups[:1] for seed in group]
    runs += [(variant, seed) for variant in ("wrong_sign", "half_lr") for seed in groups[0]]
    runs += [("equal", seed) for group in groups[1:] for seed in group]
    with ThreadPoolExecutor(options.parallel) as pool:
        for done in [pool.submit(partial(run, folder, *each)) for each in runs]:
            done.result()
    equal = [result(folder, "equal", group) for group in groups]
    alarms = [
        [row.measure for row in comparisons(equal[2 * pair], equal[2 * pair + 1]) if row.verdict != "equal"]
        for pair in range(options.pairs)
    ]
    found = {
        variant: {
            row.measure: {"difference": round(row.difference.difference, 3), "p": row.p_worse, "verdict": row.verdict}
            for row in comparisons(equal[0], result(folder, variant, groups[0]))
        }
        for variant in ("wrong_sign", "half_lr")
    }
    missed = [name for name, rows in found.items() if all(row["verdict"] != "worse" for row in rows.values())]
    report = {"pairs": options.pairs, "seeds": count, "pairs_with_a_difference": sum(map(bool, alarms)), "found": found}
    print(json.dumps(report))
    sys.exit(1 if any(alarms) or missed else 0)


if __name__ == "__main__":
    main()
