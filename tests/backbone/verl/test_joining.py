"""Runs that join a Ray which is there, of two nodes, and leave it as it was."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.backbone.runs import Run, losses
from tests.backbone.verl.runs import make_job

pytestmark = [pytest.mark.verl, pytest.mark.slow]

KEY = "nobody-but-the-nodes-knows-8f1c"
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

WHAT_IS_LEFT = """
import json, sys, time, ray
from ray._private.state import actors
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for _ in range(100):
    living = [found["ActorClassName"] for found in actors().values() if found["State"] != "DEAD"]
    groups = [found for found in ray.util.placement_group_table().values() if found["state"] != "REMOVED"]
    all_, free = ray.cluster_resources(), ray.available_resources()
    left = {
        "actors": living + ray.util.list_named_actors(all_namespaces=True), "groups": len(groups),
        "taken": {kind: all_[kind] - free.get(kind, 0) for kind in ("CPU", "GPU") if all_[kind] != free.get(kind, 0)},
    }
    if not any(left.values()):
        break
    time.sleep(0.1)
print(json.dumps({"nodes": sum(node["Alive"] for node in ray.nodes()), **left}))
"""


@dataclass
class TwoNodes:
    """A Ray that no run has started.

    Attributes:
        address: of its head.
        folder: of its logs.
        accidents: what agents in its workers share.
    """

    address: str
    folder: Path
    accidents: Path

    def run(self, workflow: str, model: Path, folder: Path, **settings: object) -> Run:
        """Start a run that joins it."""
        settings = {"rollout__max_env_worker": 4, "trainer_common__ray_address": self.address, **settings}
        return Run(make_job(workflow, model, folder, **settings), folder, **ON_LOOPBACK)

    def what_is_left(self) -> dict[str, object]:
        """How many nodes it has, and what of runs is still in it after some patience."""
        command = [sys.executable, "-c", WHAT_IS_LEFT, self.address]
        done = subprocess.run(
            command, env=os.environ | ON_LOOPBACK, capture_output=True, text=True, timeout=120, check=True
        )
        left: dict[str, object] = json.loads(done.stdout)
        return left


AS_BEFORE = {"nodes": 2, "actors": [], "groups": 0, "taken": {}}


@contextlib.contextmanager
def two_nodes_at(folder: str, *words: str, **environment: str) -> Iterator[str]:
    """Start them, with logs in `folder`; gives the head's address."""
    command = [sys.executable, str(Path(__file__).parent / "two_nodes.py"), folder, *words]
    ray = subprocess.Popen(
        command,
        env=os.environ | ON_LOOPBACK | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert ray.stdin is not None
    assert ray.stdout is not None
    with ray, ray.stdin, ray.stdout:
        yield ray.stdout.readline().strip()
        ray.stdin.close()
        ray.wait(60)


@pytest.fixture(scope="module")
def short() -> Iterator[Path]:
    """A folder whose path leaves room for those of sockets."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def two_nodes(short: Path) -> Iterator[TwoNodes]:
    accidents = short / "accidents"
    accidents.mkdir()
    environment = {"RAY_memory_monitor_refresh_ms": "0", "ACCIDENTS": str(accidents), "NODE_API_KEY": KEY}
    with two_nodes_at(str(short / "ray"), **environment) as address:
        yield TwoNodes(address, short / "ray", accidents)


JOINS = """
import sys
from omegaconf import OmegaConf
from astuner.backbone.verl.cluster import environment_prepared, ray_running
config = OmegaConf.create({"ray_kwargs": {"ray_init": {"address": sys.argv[1]}}, "transfer_queue": {}})
with environment_prepared("cpu", own=False) as environment, ray_running(config, environment):
    pass
"""


def test_a_ray_of_another_version_is_named(short: Path):
    with two_nodes_at(str(short / "old"), "2.0.0") as address:
        command = [sys.executable, "-c", JOINS, address]
        done = subprocess.run(
            command, env=os.environ | ON_LOOPBACK, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    said = done.stderr.strip().splitlines()[-1]
    assert f"the Ray at {address} could not be joined: Version mismatch" in said
    assert "Ray: 2.0.0" in said
    assert "Start its nodes in this environment, whose Ray and Python it has to have" in said


def test_a_run_trains_on_both_nodes_and_keeps_their_secrets(two_nodes: TwoNodes, model_folder: Path, tmp_path: Path):
    run = two_nodes.run("TellsSecrets", model_folder, tmp_path, trainer_common__total_training_steps=2)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    assert two_nodes.what_is_left() == AS_BEFORE
    assert list(losses(run.record)) == [1, 2]
    ran = [line.split() for line in (two_nodes.accidents / "ran").read_text().splitlines()]
    assert len({node for _, _, node in ran}) == 2
    changes = sorted(itertools.chain(*([(float(began), 1), (float(ended), -1)] for began, ended, _ in ran)))
    assert 2 <= max(itertools.accumulate(change for _, change in changes)) <= 4
    files = [path for place in (two_nodes.folder, tmp_path) for path in place.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert "refused: [redacted]" in (run.record / "run.log").read_text()
    assert any(b"the key is [redacted]" in path.read_bytes() for path in two_nodes.folder.rglob("worker-*"))


def test_nothing_of_a_run_stays_after_an_error(two_nodes: TwoNodes, model_folder: Path, tmp_path: Path):
    run = two_nodes.run("EngineAccident", model_folder, tmp_path, trainer_common__total_training_steps=4)
    code, printed = run.ended()
    assert code == 1, printed
    assert "a rollout engine is gone" in printed
    assert two_nodes.what_is_left() == AS_BEFORE


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_of_a_run_stays_after_a_signal(
    two_nodes: TwoNodes, model_folder: Path, tmp_path: Path, number: signal.Signals, exit_code: int
):
    settings = {"trainer_common__total_training_steps": 10_000, "trainer_common__total_epochs": 10_000}
    run = two_nodes.run("Letters", model_folder, tmp_path, trainer_common__save_freq=10_000, **settings)
    run.wait_for(step=1)
    os.killpg(run.process.pid, number)
    code, printed = run.ended()
    assert code == exit_code, printed
    assert run.leftovers() == []
    assert two_nodes.what_is_left() == AS_BEFORE
