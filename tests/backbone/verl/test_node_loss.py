"""The loss of a node in the midst of a rollout and of an update."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

import pytest

from campaigns.ray_nodes import Campaign, Layout, Scenario, is_faulty, started_cluster
from tests.backbone.runs import PATIENCE

SCRIPT = Path(__file__).parent / "episodes_on_a_cluster.py"
pytestmark = [pytest.mark.verl, pytest.mark.slow]


def nodes_of_episodes(folder: Path) -> dict[str, list[str]]:
    """Return the addresses of the nodes that have started each episode."""
    nodes = defaultdict(list)
    for file in folder.glob("*.ran"):
        nodes[file.name.partition(".")[0]].append(file.read_text())
    return nodes


def test_episodes_of_a_lost_node_run_again_on_another(model_folder: Path, tmp_path: Path):
    with started_cluster(sys.executable, Layout((0, 0), {})) as cluster:
        script = [sys.executable, str(SCRIPT), cluster.address, str(model_folder), str(tmp_path)]
        # Read when ray is imported.
        environment = os.environ | {
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        run = subprocess.Popen(script, env=environment, stdout=subprocess.PIPE, text=True)
        with run:
            assert run.stdout is not None
            until = time.monotonic() + PATIENCE
            while len(nodes_of_episodes(tmp_path)) < 6:
                assert run.poll() is None
                assert time.monotonic() < until
                time.sleep(0.1)
            cluster.command("kill", cluster.nodes[1])
            (tmp_path / "continue").touch()
            outcome = json.loads(run.stdout.read().splitlines()[-1])
    assert run.returncode == 0
    nodes = nodes_of_episodes(tmp_path)
    # They call no model. The kind of a lost episode is `worker`.
    assert set(outcome["error_kinds"].values()) == {"no_tokens"}
    assert sorted(outcome["reported"]) == sorted(outcome["error_kinds"]) == sorted(nodes)
    lost = [episode for episode, places in nodes.items() if cluster.nodes[1] in places]
    assert len(lost) in (2, 4)  # one task or two
    assert all(sorted(nodes[episode]) == cluster.nodes for episode in lost)
    assert all(nodes[episode] == cluster.nodes[:1] for episode in nodes.keys() - set(lost))
    (warning,) = [warning for warning in outcome["warnings"] if "host was lost" in warning]
    assert "an episode host was lost in train step 1 (" in warning
    assert f"{len(lost)} of its episodes had not finished" in warning


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory) -> Campaign:
    """Return a campaign whose scenarios are compared with one undisturbed run."""
    return Campaign("verl", sys.executable, tmp_path_factory.mktemp("campaign"))


@pytest.mark.long
@pytest.mark.parametrize(
    "scenario", [Scenario("two nodes", "kill", "rollout"), Scenario("three nodes", "kill", "update")]
)
def test_a_run_that_loses_a_node_goes_on_or_resumes(scenario: Scenario, campaign: Campaign):
    facts = campaign.report(scenario)
    assert not is_faulty(facts, ends=scenario.ends("verl")), facts
