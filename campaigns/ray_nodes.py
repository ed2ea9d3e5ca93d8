"""Lose and add nodes of the Ray cluster that a run has joined, start the run again, and compare the records.

The cluster has two or three nodes on this machine: separate raylets with their own addresses and resources. In each
scenario, a node is lost or added in the midst of a rollout or an update. If the run ends, it has to name the node
within a bounded time; then a node is added in place of the lost one, and the same command resumes the run. The record
is compared with that of an undisturbed run. Sampled tokens may differ, so only missing and doubled
rows count. Prints one line of JSON per scenario and one at the end, and exits with 1 if there is a fault.

    python -m campaigns.ray_nodes --backbone verl --python INTERPRETER [--only TEXT] [--keep FOLDER]

INTERPRETER is that of the backbone's environment.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from campaigns import node_cluster
from campaigns.kill_campaign import create_model
from campaigns.observed_run import ObservedRun
from campaigns.preemption import DIFFERENCES
from campaigns.serial_run import compare, write_job

_CPUS = 8
_DELAYS = {"rollout": 2.0, "update": 0.0}
"""Seconds from the start of a phase to the event. A rollout takes longer than the pause of `SlowTwoTurns`."""
_LONGEST_END = 180.0
"""Seconds after the loss of a node within which a run has to end or go on."""


@dataclass(frozen=True)
class Layout:
    """The nodes of a cluster.

    Attributes:
        gpus: the declared number of GPUs of each node, the head first.
        settings: settings of the run.
    """

    gpus: tuple[int, ...]
    settings: dict[str, Any]


LAYOUTS = {
    "verl": {
        "two nodes": Layout((1, 0), {"trainer_common__nnodes": 1}),
        "three nodes": Layout((0, 1, 1), {"trainer_common__nnodes": 2}),
    },
    "trinity": {
        "two nodes": Layout((0, 0), {}),
        "three nodes": Layout((0, 0, 0), {}),
    },
}


@dataclass(frozen=True)
class Scenario:
    """What happens to the cluster.

    Attributes:
        layout: the cluster.
        command: "kill" or "freeze" for the last node of the layout, or "add" for a further one.
        phase: astuner's phase, in whose second block it happens.
    """

    layout: str
    command: str
    phase: str

    @property
    def title(self) -> str:
        """The name of the scenario in the report."""
        return f"{self.layout}, {self.command}, {self.phase}"

    def ends(self, backbone: str) -> bool:
        """Return whether the run has to end and to be resumed; otherwise it has to go on.

        Training workers and engines are on nodes with GPUs. The other processes of a run, except for episode workers,
        are on the node of the command.
        """
        return self.command != "add" and LAYOUTS[backbone][self.layout].gpus[-1] > 0


SCENARIOS = (
    Scenario("two nodes", "kill", "rollout"),
    Scenario("two nodes", "kill", "update"),
    Scenario("three nodes", "kill", "rollout"),
    Scenario("three nodes", "kill", "update"),
    Scenario("two nodes", "add", "rollout"),
    Scenario("three nodes", "freeze", "update"),
)


class NodeCluster:
    """A cluster in a process of its own.

    Attributes:
        address: `host:port` of its head.
        nodes: addresses of its nodes, the head first.
    """

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.address = ""
        self.nodes: list[str] = []

    def add(self, gpus: int) -> None:
        """Start a node with a declared number of GPUs."""
        answer = self.command("add", str(_CPUS), str(gpus))
        self.address = answer["cluster"]
        self.nodes.append(answer["address"])

    def command(self, *words: str) -> dict[str, str]:
        """Send a command of `node_cluster` and return the answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(*words, file=self._process.stdin, flush=True)
        answer: dict[str, str] = json.loads(self._process.stdout.readline())
        return answer


@contextlib.contextmanager
def started_cluster(python: str, layout: Layout) -> Iterator[NodeCluster]:
    """Start the nodes of a layout for the block."""
    with tempfile.TemporaryDirectory(prefix="n", dir="/tmp") as short:  # paths of sockets are limited
        process = subprocess.Popen(
            [python, node_cluster.__file__, f"{short}/ray"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        with process:
            cluster = NodeCluster(process)
            for gpus in layout.gpus:
                cluster.add(gpus)
            yield cluster


class Campaign:
    """Runs of one backbone on clusters.

    Attributes:
        backbone: verl or trinity.
        python: the interpreter of its environment.
        folder: folder of the records.
    """

    def __init__(self, backbone: str, python: str, folder: Path) -> None:
        self.backbone, self.python, self.folder = backbone, python, folder
        self.model = create_model(folder)

    def run(self, layout: str, name: str, cluster: NodeCluster) -> ObservedRun:
        """Return a run that joins the cluster."""
        settings = {
            "backbone": self.backbone,
            "trainer_common__ray_address": cluster.address,
            "trainer_common__device": "cpu",
            "trainer_common__save_freq": 1,
            "trainer_common__max_checkpoints_to_keep": 2,
            "rollout__max_env_worker": 4,
        }
        folder = self.folder / name.replace(", ", "-").replace(" ", "_")
        files = folder.with_name(f"{folder.name}-files")
        files.mkdir()
        settings |= LAYOUTS[self.backbone][layout].settings
        yaml = write_job(files, self.model, "SlowTwoTurns", **settings)
        return ObservedRun(yaml, folder, self.python, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")

    def undisturbed(self, layout: str) -> Path:
        """Return the record of a finished run. If there is none, start one, on the layout; its rows are those of all.

        Raises:
            RuntimeError: the run failed.
        """
        record = self.folder / "undisturbed" / "run"
        if not (record / "model").exists():
            with started_cluster(self.python, LAYOUTS[self.backbone][layout]) as cluster:
                run = self.run(layout, "undisturbed", cluster)
                code, _ = run.execute()
            if code != 0:
                raise RuntimeError(f"the undisturbed run ended with {code}; see {run.log}")
        return record

    def report(self, scenario: Scenario) -> dict[str, Any]:
        """Run a scenario and return the facts of the report."""
        whole = self.undisturbed(scenario.layout)
        layout = LAYOUTS[self.backbone][scenario.layout]
        with started_cluster(self.python, layout) as cluster:
            run = self.run(scenario.layout, scenario.title, cluster)
            run.start()
            run.wait_until_block(scenario.phase, 2)
            time.sleep(_DELAYS[scenario.phase])
            lost = cluster.nodes[-1]
            started = time.monotonic()
            if scenario.command != "add":
                cluster.command(scenario.command, lost)
            facts: dict[str, Any] = {"in_phase": (scenario.phase, 2) not in run.durations()}
            if scenario.command == "add":
                cluster.add(layout.gpus[-1])  # takes longer than the phase
            facts |= {"exit_code": run.end(), "seconds": round(time.monotonic() - started, 1)}
            facts["leftover_processes"] = run.leftovers()
            if facts["exit_code"]:
                facts["error"] = run.printed().strip().splitlines()[-1]
                facts["is_named"] = f"node {lost}" in facts["error"]
                cluster.add(layout.gpus[-1])
                facts["second_exit_code"], _ = run.execute()
                facts["resumed_from"] = run.resumed_from()
        if facts.get("second_exit_code", facts["exit_code"]):
            return facts
        comparison = compare(whole, run.record)
        return facts | {name: len(getattr(comparison, name)) for name in DIFFERENCES}


def is_faulty(facts: dict[str, Any], *, ends: bool) -> bool:
    """Return whether the event missed its phase, the outcome was unexpected, late or unnamed, or rows are not equal."""
    names = ("leftover_processes", "second_exit_code", "lost", "extra", "doubled", "leftovers")
    named = not ends or (facts["is_named"] and facts["seconds"] < _LONGEST_END)
    is_expected = facts["in_phase"] and facts["exit_code"] == int(ends) and named
    return not is_expected or any(facts.get(name) for name in names)


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backbone", choices=tuple(LAYOUTS), required=True)
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the backbone's environment")
    parser.add_argument("--only", default="", help="run only the scenarios whose title contains this text")
    parser.add_argument("--keep", type=Path, help="folder for the records, which a later call compares with")
    options = parser.parse_args()
    scenarios = [scenario for scenario in SCENARIOS if options.only in scenario.title]
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.keep or Path(temporary)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        campaign = Campaign(options.backbone, options.python, folder)
        faults = []
        for scenario in scenarios:
            facts = campaign.report(scenario)
            print(json.dumps({"backbone": options.backbone, "scenario": scenario.title, **facts}), flush=True)
            faults += [scenario.title] if is_faulty(facts, ends=scenario.ends(options.backbone)) else []
    print(json.dumps({"backbone": options.backbone, "scenarios": len(scenarios), "faults": faults}))
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
