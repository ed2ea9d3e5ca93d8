"""Runs on a Ray that `--with-ray` starts, next to any other Ray, and stops afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from astuner.run_record import read_metrics
from tests.backbone.runs import Run, losses
from tests.backbone.verl.runs import make_job

pytestmark = [pytest.mark.verl, pytest.mark.slow]


@pytest.fixture
def short() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(autouse=True)
def rays_usual_port_taken() -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # another process uses it
            stack.enter_context(socket.create_server(("127.0.0.1", 6379)))
        yield


def wait_until_empty(folder: Path) -> None:
    """Wait at most half a minute until a folder is empty."""
    until = time.monotonic() + 30
    while any(folder.iterdir()):
        assert time.monotonic() < until, [path.name for path in folder.iterdir()]
        time.sleep(0.1)


def test_a_model_teaches_itself_on_the_ray_of_with_ray(model_folder: Path, tmp_path: Path, short: Path):
    """With a hint, on tokens of high entropy."""
    settings = {
        "trainer_common__distillation__teacher": "self",
        "trainer_common__distillation__hint": "Use letters: {unlucky}",
        "trainer_common__distillation__reward_coef": 1.0,
        "trainer_common__algorithm__high_entropy_share": 0.5,
        "trainer_common__total_training_steps": 2,
    }
    job = make_job("Letters", model_folder, tmp_path, **settings)
    # If the user has a token, Ray requires it.
    run = Run(job, tmp_path, "--with-ray", RAY_TMPDIR=str(short), RAY_AUTH_TOKEN="0123456789abcdef" * 4)
    code, printed = run.ended()
    assert code == 0, printed
    assert "service ray: ready after" in printed
    assert list(losses(run.record)) == [1, 2]
    assert "Ray runtime started" in (run.record / "services" / "ray.log").read_text()
    assert run.leftovers() == []
    wait_until_empty(short)
    # The recorded configuration applies to every run, and the address only to this one.
    assert "ray_address: null" in (run.record / "config.yaml").read_text()
    steps = [row.metrics for row in read_metrics(run.record) if "distillation/kl" in row.metrics]
    assert len(steps) == 2
    for metrics in steps:
        assert metrics["distillation/calls_without_hint"] == 0
        assert abs(metrics["distillation/kl"]) > 1e-4
        assert metrics["update/optimiser_steps"] == 2
        assert metrics["grad_norm"] > 0


def test_the_ray_of_a_killed_run_ends(model_folder: Path, tmp_path: Path, short: Path):
    settings = {"trainer_common__total_training_steps": 10_000, "trainer_common__total_epochs": 10_000}
    job = make_job("Letters", model_folder, tmp_path, trainer_common__save_freq=10_000, **settings)
    run = Run(job, tmp_path, "--with-ray", RAY_TMPDIR=str(short))
    run.wait_until_actor("TransferQueueController")
    # There is no second Ray next to that of the service.
    assert not list(short.glob("astuner-ray-*"))
    os.kill(run.process.pid, signal.SIGKILL)
    run.process.wait()
    assert run.leftovers() == []
    wait_until_empty(short)
