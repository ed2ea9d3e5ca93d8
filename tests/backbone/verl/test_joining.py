"""Runs that connect to an existing Ray of two nodes and leave nothing behind on it."""

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

KEY = "known-to-the-nodes-only-8f1c"
ON_LOOPBACK = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0"}

LIST_LEFTOVERS = """
import json, sys, time, ray
from ray._private.state import actors
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
for _ in range(100):
    living = [actor["ActorClassName"] for actor in actors().values() if actor["State"] != "DEAD"]
    groups = [group for group in ray.util.placement_group_table().values() if group["state"] != "REMOVED"]
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
    """A Ray that the runs connect to.

    Attributes:
        address: address of the head node.
        folder: folder of its logs.
        shared: folder that agents in all workers share.
    """

    address: str
    folder: Path
    shared: Path

    def run(self, workflow: str, model: Path, folder: Path, **settings: object) -> Run:
        """Start a run that connects to it."""
        settings = {"rollout__max_env_worker": 4, "trainer_common__ray_address": self.address, **settings}
        return Run(make_job(workflow, model, folder, **settings), folder, **ON_LOOPBACK)

    def leftovers_on_ray(self) -> dict[str, object]:
        """Return the number of nodes, and the actors and resources that runs still hold after a while."""
        command = [sys.executable, "-c", LIST_LEFTOVERS, self.address]
        done = subprocess.run(
            command, env=os.environ | ON_LOOPBACK, capture_output=True, text=True, timeout=120, check=True
        )
        left: dict[str, object] = json.loads(done.stdout)
        return left


AS_BEFORE = {"nodes": 2, "actors": [], "groups": 0, "taken": {}}


@contextlib.contextmanager
def two_nodes_at(folder: str, *words: str, **environment: str) -> Iterator[str]:
    """Start two nodes with logs in `folder`, and yield the head's address."""
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
    """A folder with a short path, since paths of sockets are limited."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def two_nodes(short: Path) -> Iterator[TwoNodes]:
    shared = short / "shared"
    shared.mkdir()
    environment = {"RAY_memory_monitor_refresh_ms": "0", "SHARED_FOLDER": str(shared), "NODE_API_KEY": KEY}
    with two_nodes_at(str(short / "ray"), **environment) as address:
        yield TwoNodes(address, short / "ray", shared)


JOINS = """
import sys
from omegaconf import OmegaConf
from astuner.backbone.verl.cluster import verl_environment, ray_running
config = OmegaConf.create({"ray_kwargs": {"ray_init": {"address": sys.argv[1]}}, "transfer_queue": {}})
with verl_environment("cpu", own_ray=False) as environment, ray_running(config, environment):
    pass
"""


def test_a_ray_of_another_version_is_reported(short: Path):
    with two_nodes_at(str(short / "old"), "2.0.0") as address:
        command = [sys.executable, "-c", JOINS, address]
        done = subprocess.run(
            command, env=os.environ | ON_LOOPBACK, capture_output=True, text=True, timeout=120, check=False
        )
    assert done.returncode == 1
    message = done.stderr.strip().splitlines()[-1]
    assert f"could not connect to Ray at {address}: Version mismatch" in message
    assert "Ray: 2.0.0" in message
    assert "Start its nodes with the Ray and Python versions of this environment" in message


def test_a_run_trains_on_both_nodes_and_keeps_their_secrets(two_nodes: TwoNodes, model_folder: Path, tmp_path: Path):
    run = two_nodes.run("PrintsSecrets", model_folder, tmp_path, trainer_common__total_training_steps=1)
    code, printed = run.ended()
    assert code == 0, printed
    assert run.leftovers() == []
    assert two_nodes.leftovers_on_ray() == AS_BEFORE
    assert list(losses(run.record)) == [1]
    ran = [line.split() for line in (two_nodes.shared / "ran").read_text().splitlines()]
    assert len({node for _, _, node in ran}) == 2
    changes = sorted(itertools.chain(*([(float(start), 1), (float(end), -1)] for start, end, _ in ran)))
    assert 2 <= max(itertools.accumulate(change for _, change in changes)) <= 4
    files = [path for folder in (two_nodes.folder, tmp_path) for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert "rejected: [redacted]" in (run.record / "run.log").read_text()
    assert any(b"the key is [redacted]" in path.read_bytes() for path in two_nodes.folder.rglob("worker-*"))


@pytest.mark.long
def test_nothing_is_left_after_an_error(two_nodes: TwoNodes, model_folder: Path, tmp_path: Path):
    run = two_nodes.run("EngineDies", model_folder, tmp_path, trainer_common__total_training_steps=4)
    code, printed = run.ended()
    assert code == 1, printed
    assert "a rollout engine failed" in printed
    assert two_nodes.leftovers_on_ray() == AS_BEFORE


@pytest.mark.long
@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)])
def test_nothing_is_left_after_a_signal(
    two_nodes: TwoNodes, model_folder: Path, tmp_path: Path, number: signal.Signals, exit_code: int
):
    settings = {"trainer_common__total_training_steps": 10_000, "trainer_common__total_epochs": 10_000}
    run = two_nodes.run("Letters", model_folder, tmp_path, trainer_common__save_freq=10_000, **settings)
    run.wait_for(step=1)
    os.killpg(run.process.pid, number)
    code, printed = run.ended()
    assert code == exit_code, printed
    assert run.leftovers() == []
    assert two_nodes.leftovers_on_ray() == AS_BEFORE
