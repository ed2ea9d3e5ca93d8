"""The commands `astuner env list`, `show` and `validate`."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from astuner.cli.main import astuner
from astuner.env_service import Environment
from astuner.env_service.environment import ADAPTERS, adapter
from astuner.schema import Action, Evaluation, Observation, Reference, StepResult, TaskProfile
from tests.env_service.services import ENVIRONMENTS, Service

KEYS = ["env", "ok", "reference", "empty", "garbage", "deterministic", "step_ms_p50", "error"]


class Checked(Environment):
    """The answer is `yes`. The parameter `fault` makes a check fail."""

    def __init__(self, fault: str = "") -> None:
        self._fault = fault
        self._answer: Action = ""
        print("this line is not output of the command")

    def splits(self) -> Sequence[str]:
        return ["only"]

    def task_ids(self, split: str) -> Sequence[str]:
        return [] if self._fault == "no tasks" else ["a", "b", "c"]

    def profile(self, split: str, task_id: str) -> TaskProfile:
        reference = None if self._fault == "garbage succeeds" else Reference(("no", "yes"), 2.0)
        return TaskProfile(task_id, "Say yes.", reference=reference)

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        if self._fault == "hangs":
            import time

            time.sleep(3600)
        return Observation(str(os.getpid()) if self._fault == "random" else "Well?")

    def step(self, action: Action) -> StepResult:
        if action == "" and self._fault == "empty raises":
            raise ValueError("empty")
        if self._fault == "crashes":
            os._exit(5)
        self._answer = action
        print("nor is this")
        return StepResult(Observation("Go on."), is_done=action != "no")

    def evaluate(self) -> Evaluation:
        if self._fault == "empty scores" and self._answer == "":
            return Evaluation(2.0)
        if self._fault == "garbage succeeds" and self._answer != "":
            return Evaluation(0.5)
        if self._fault == "reference fails":
            return Evaluation(1.5 if self._answer == "yes" else 0.0)
        return Evaluation(2.0 if self._answer == "yes" else 0.0, is_success=self._answer == "yes")


class Silent(Checked):
    """The solution is an empty text."""

    def profile(self, split: str, task_id: str) -> TaskProfile:
        return TaskProfile(task_id, "Say nothing.", reference=Reference(("",), 3.0))

    def evaluate(self) -> Evaluation:
        return Evaluation(3.0 if self._answer == "" else 0.0)


CHECKED = f"{__file__}->Checked"

# For each class: the fault, a part of the error, and some fields of its row.
FAULTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Weak": ("reference fails", "the reference ['no', 'yes'] scores 1.5 instead of 2", {"reference": 1.5}),
    "Lax": ("empty scores", "the empty answer scores 2, as much as the reference (2)", {"empty": 2, "garbage": 0}),
    "Brittle": ("empty raises", "the empty answer failed: ", {"empty": None, "garbage": 0, "reference": 2}),
    "Generous": (
        "garbage succeeds",
        "the garbage answer succeeds, with score 0.5",
        {"reference": None, "garbage": 0.5},
    ),
    "Fickle": ("random", "equal seeds and actions gave different observations", {"deterministic": False}),
    "Crashing": ("crashes", "ended with exit code 5", {"reference": None, "step_ms_p50": None, "deterministic": None}),
    "Vacant": ("no tasks", "the splits (only) have no task", {"empty": None}),
}


def _with_fault(fault: str) -> type[Checked]:
    class Faulty(Checked):
        def __init__(self) -> None:
            super().__init__(fault)

    return Faulty


for _name, (_fault, _, _) in FAULTS.items():
    globals()[_name] = _with_fault(_fault)


def run(*arguments: str, input: str | None = None) -> Result:
    return CliRunner().invoke(astuner, ["env", *arguments], standalone_mode=False, input=input)


def rows(result: Result) -> list[dict[str, Any]]:
    assert result.exception is None, result.exception
    return [json.loads(line) for line in result.stdout.splitlines()]


def test_json_has_one_object_a_line_with_these_keys() -> None:
    result = run("validate", "gymnasium/FrozenLake-v1", CHECKED, "gymnasium/Blackjack-v1", "--json", "--tasks=1")
    assert result.return_value == 0
    lake, own, cards = rows(result)
    for row in (lake, own, cards):
        assert list(row) == KEYS
        assert row["ok"] is row["deterministic"] is True
        assert row["error"] is None
        assert row["step_ms_p50"] > 0
    assert (lake["env"], lake["reference"], lake["empty"], lake["garbage"]) == ("gymnasium/FrozenLake-v1", 1, 0, 0)
    assert (own["env"], own["reference"], own["empty"], own["garbage"]) == (CHECKED, 2, 0, 0)
    assert cards["reference"] is None


def test_faults_are_named() -> None:
    result = run("validate", *(f"{__file__}->{name}" for name in FAULTS), "--json", "--tasks=1")
    assert result.return_value == 1
    listed = rows(result)
    assert len(listed) == len(FAULTS)
    for row, (_, error, values) in zip(listed, FAULTS.values(), strict=True):
        assert row["ok"] is False
        assert error in row["error"]
        assert {name: row[name] for name in values} == values


def test_an_environment_that_hangs_or_does_not_exist_is_one_row() -> None:
    result = run("validate", CHECKED, "--param=fault=hangs", "--json", "--timeout=1")
    assert result.return_value == 1
    assert "took longer than 1 s" in rows(result)[0]["error"]
    result = run("validate", "gymnasium/Chess-v9", f"{__file__}->Chess", "minigrid/", CHECKED, "--json")
    assert result.return_value == 1
    listed = rows(result)
    assert [row["ok"] for row in listed] == [False, False, False, True]
    assert "has no environment 'Chess-v9'" in listed[0]["error"]
    assert "has no Chess" in listed[1]["error"]
    assert "there is no environment 'minigrid/'" in listed[2]["error"]


def test_the_table_has_the_results_and_the_problems_below() -> None:
    result = run("validate", CHECKED, "gymnasium/Taxi", "--tasks=1")
    assert result.exception is None
    assert "2 of 2 environments pass" in result.stdout
    assert "gymnasium/Taxi" in result.stdout
    result = run("validate", CHECKED, "--param=fault=reference fails", "--tasks=2")
    assert result.return_value == 1
    assert "0 of 1 environments pass" in result.stdout
    assert "only task a: the reference ['no', 'yes'] scores 1.5 instead of 2; only task b: " in result.stdout
    assert "only task c" not in result.stdout


def test_a_running_service_is_checked_over_http(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {each["instance_id"] for each in service.instances()}
    result = run("validate", "guess", "async", "--json", f"--url={service.address.url}")
    assert result.return_value == 0
    assert [(row["env"], row["reference"], row["error"]) for row in rows(result)] == [
        ("guess", 1, None),
        ("async", 1, None),
    ]
    assert {each["instance_id"] for each in service.instances()} <= before
    shown = json.loads(run("show", "guess", "--json", f"--url={service.address.url}").stdout)
    assert (shown["split"], shown["task"]) == ("train", "number-0")
    result = run("validate", "chess", "--json", f"--url={service.address.url}")
    assert "the service has no environment 'chess'" in rows(result)[0]["error"]


def test_instances_of_one_process_seats_and_empty_solutions_are_checked() -> None:
    result = run(
        *("validate", f"{ENVIRONMENTS}->AsyncGuessNumber", f"{ENVIRONMENTS}->TwoSeats", f"{__file__}->Silent", "--json")
    )
    one, two, silent = rows(result)
    assert (one["ok"], one["reference"]) == (True, 1)
    assert "scores -1 instead of 1" in two["error"]
    assert (silent["ok"], silent["reference"], silent["empty"], silent["garbage"]) == (True, 3, None, 0)


def test_nothing_to_check_is_a_usage_error() -> None:
    for arguments in ([], ["--tasks=0", CHECKED], ["--param=fault", CHECKED], ["--family=chess"]):
        error = run("validate", *arguments).exception
        assert type(error).__module__.startswith("click"), error


def test_show_prints_a_task_without_its_reference() -> None:
    text = run("show", CHECKED).stdout
    assert "not output" not in text
    for line in ("split: only", "task: a", "instruction: Say yes.", "observation: Well?"):
        assert line in text.splitlines()
    assert 'yes"' not in text
    shown = json.loads(run("show", CHECKED, "--task=b", "--split=only", "--reference", "--json").stdout)
    assert shown["task"] == "b"
    assert shown["reference"] == {"actions": ["no", "yes"], "score": 2.0}
    lake = json.loads(run("show", "gymnasium/FrozenLake-v1", "--split=validation", "--param=size=5", "--json").stdout)
    assert lake["observation"].count("\n") == 4
    assert lake["legal_actions"] == ["left", "down", "right", "up"]
    assert lake["tools"][0]["function"]["name"] == "act"
    assert "reference" not in lake


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=z"], "has no task 'z'"),
        (["--split=test"], "there is no split 'test'"),
        (["--param=fault=no tasks"], "split only of .* has no task; its splits are only"),
        (["--param=color=red"], "could not be created with the parameters"),
    ],
)
def test_show_says_what_does_not_exist(arguments: list[str], message: str) -> None:
    result = run("show", CHECKED, *arguments)
    assert result.exception is not None
    with pytest.raises(type(result.exception), match=message):
        raise result.exception


def test_list_shows_what_is_installed_and_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    text = run("list", "--family=gymnasium").stdout
    assert text.splitlines()[0] == f"gymnasium: {len(adapter('gymnasium').names())}"
    assert "  gymnasium/FrozenLake-v1" in text.splitlines()
    for family in ADAPTERS.keys() - {"gymnasium", "minigrid"}:
        monkeypatch.delitem(ADAPTERS, family)
    monkeypatch.setitem(ADAPTERS, "gymnasium", "astuner_no_such_package.adapter")
    listed = {row["family"]: row for row in rows(run("list", "--json"))}
    assert set(listed) == set(ADAPTERS)
    assert listed["minigrid"]["installed"]
    assert "minigrid/MiniGrid-DoorKey-5x5-v0" in listed["minigrid"]["environments"]
    assert not listed["gymnasium"]["installed"]
    assert "pip install 'astuner[gymnasium]'" in listed["gymnasium"]["error"]


class Hashed(Checked):
    """An environment whose observation depends on the seed of Python's hashes."""

    def reset(self, split: str, task_id: str, seed: int) -> Observation:
        return Observation(str(hash("astuner")))


def test_tasks_do_not_depend_on_the_hash_seed_of_the_service(tmp_path: Path) -> None:
    seen = {run("show", f"{__file__}->Hashed", "--json").stdout for _ in range(2)}
    assert len(seen) == 1
