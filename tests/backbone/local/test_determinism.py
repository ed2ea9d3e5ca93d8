"""Two deterministic runs with the same seed compute the same bytes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner import AstunerJob
from astuner.backbone.local.backbone import SpareCores
from astuner.run_record import read_index, read_metrics, read_recorded_episode

MakeJob = Callable[..., AstunerJob]


def contents(record: Path) -> dict[str, Any]:
    """What a run has sampled and computed: tokens, logprobs, rewards, advantages, metrics without times."""
    found: dict[str, Any] = {}
    for entry in read_index(record):
        recorded = read_recorded_episode(record / entry.path)
        calls = [(c.prompt_ids, c.completion_ids, c.logprobs, c.sampling, c.agent_name) for c in recorded.episode.calls]
        found[entry.episode_id] = (calls, recorded.episode.reward, entry.advantage, recorded.updates)
    for row in read_metrics(record):
        untimed = {name: value for name, value in row.metrics.items() if not name.startswith("time/")}
        found.setdefault(f"metrics {row.step}", []).append(untimed)
    return found


def state_of(checkpoint: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(checkpoint / "trainer.pt", weights_only=True)
    return state


def equal_bits(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and a.numpy().tobytes() == b.numpy().tobytes()
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal_bits(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal_bits, a, b))
    return bool(a == b)


@pytest.mark.parametrize(
    "settings",
    [
        {"model__lora__rank": 4},
        {"trainer_common__mini_batch_num": 2, "trainer_common__use_kl_loss": True, "model__dtype": "bfloat16"},
    ],
)
def test_two_runs_are_equal_to_the_last_bit(make_job: MakeJob, tmp_path: Path, settings: dict[str, Any]):
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    records = []
    for number, workers in enumerate((4, 2)):
        job = make_job(
            "ArrivesAnyTime",
            trainer_common__deterministic=True,
            trainer_common__total_training_steps=2,
            rollout__max_env_worker=workers,
            **settings,
        )
        records.append(job.tune(tmp_path / str(number)).record)
    assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before
    first, second = map(contents, records)
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value == second[name], name
    for step in (1, 2):
        one, other = (state_of(record / f"checkpoints/step_{step:06d}") for record in records)
        for part in ("trained", "optimiser", "rng"):
            assert equal_bits(one[part], other[part]), (step, part)
    weights = [(record / "model/model.safetensors").read_bytes() for record in records]
    assert weights[0] == weights[1]


def test_a_resumed_run_equals_an_uninterrupted_one(make_job: MakeJob, tmp_path: Path):
    settings = {"trainer_common__deterministic": True, "trainer_common__val_before_train": False}
    whole = make_job(**settings).tune(tmp_path / "whole").record
    make_job(**settings, trainer_common__total_training_steps=1).tune(tmp_path / "parts")
    parts = make_job(**settings).tune(tmp_path / "parts").record
    assert (whole / "model/model.safetensors").read_bytes() == (parts / "model/model.safetensors").read_bytes()


def test_the_number_of_threads_stays():
    before = torch.get_num_threads()
    cores = SpareCores(adapts=False)
    cores._last = (-1e9, 0.0)  # as if other processes had used every core since
    cores.adapt_threads()
    assert torch.get_num_threads() == before
