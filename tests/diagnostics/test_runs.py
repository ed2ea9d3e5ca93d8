"""Findings of whole runs: on the console, in the record, in `astuner check` and in `astuner explain`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from astuner import AstunerJob
from astuner.backbone.local.backbone import LocalSession
from astuner.cli.main import astuner as command
from astuner.errors import LogprobGapError
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.run_record import read_findings

AGENTS = Path(__file__).parent / "agents.py"
MakeJob = Callable[..., AstunerJob]


@pytest.fixture
def make_job(model_folder: Path, tmp_path: Path) -> MakeJob:
    """Return a function that makes a job whose tool is broken and whose validation tasks are training tasks."""

    def make(**settings: Any) -> AstunerJob:
        rows = [{"question": f"question {number}"} for number in range(6)]
        (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        values: dict[str, Any] = {
            "experiment_name": "run",
            "backbone": "local",
            "model__renderer": "qwen3",
            "data__train_batch_size": 3,
            "rollout__num_repeat": 2,
            "rollout__max_env_worker": 2,
            "rollout__max_response_length_in_one_turn": 8,
            "rollout__max_model_len": 256,
            "rollout__compute_madness_checklist": [],
            "trainer_common__total_training_steps": 2,
            "trainer_common__use_kl_loss": False,
            "trainer_common__optim__lr": 1e-2,
        }
        job = AstunerJob(algorithm="grpo", model=model_folder, **(values | settings))
        job.set_workflow(f"{AGENTS}->BrokenTool")
        return job.set_data("file", tmp_path / "tasks.jsonl", validation_path=tmp_path / "tasks.jsonl")

    return make


def test_findings_reach_the_console_the_record_and_explain(make_job: MakeJob, tmp_path: Path, log: list[str]):
    record = make_job().tune(tmp_path / "records").record
    found = [(finding.step, finding.check, finding.severity) for finding in read_findings(record)]
    assert found == [
        (0, "validation_in_training", "warning"),
        (1, "tool_always_fails", "error"),
        (2, "tool_always_fails", "error"),
    ]
    # On the console once.
    (printed,) = [line for line in log if "tool_always_fails" in line]
    assert "step 1: all 6 calls of the tool 'search' failed" in printed
    assert "To fix it: repair the tool" in printed
    explained = CliRunner().invoke(command, ["explain", str(record)])
    text = explained.stdout
    assert text.index("error tool_always_fails (step 1 to 2, 2 times)") < text.index("warning validation_in_training")
    assert text.index("to fix it: remove these tasks") < text.index("12 ok, 0 failed")
    as_json = json.loads(CliRunner().invoke(command, ["explain", str(record), "--json"]).stdout)
    assert [finding["check"] for finding in as_json["findings"]] == ["tool_always_fails", "validation_in_training"]


@pytest.mark.parametrize("dry_run", [False, True])
def test_check_reports_what_it_can_see(make_job: MakeJob, tmp_path: Path, log: list[str], dry_run: bool):
    yaml = make_job().dump_job_as_yaml(tmp_path / "run.yaml")
    words = ["check", "--conf", str(yaml), "--exp-dir", str(tmp_path / "records"), *["--dry-run"] * dry_run]
    result = CliRunner().invoke(command, words)
    assert result.exit_code == 0, result.output
    assert any("validation_in_training" in line for line in log)
    assert any("tool_always_fails" in line for line in log) == dry_run


def test_an_engine_with_stale_weights_ends_the_run_with_the_cause(
    make_job: MakeJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    send = EmbeddedEngine.update_weights
    sent: dict[str, Any] = {}

    def stale(engine: EmbeddedEngine, state_dict: Any, policy_version: int) -> None:
        if policy_version == 0:
            sent.update({name: tensor.clone() for name, tensor in state_dict.items()})
        send(engine, sent, policy_version)

    monkeypatch.setattr(EmbeddedEngine, "update_weights", stale)
    # The checks of the sync would end the run before the rollout.
    for check in ("_compare_weights", "_compare_logprobs"):
        monkeypatch.setattr(LocalSession, check, lambda session, engine, step: None)
    with pytest.raises(LogprobGapError, match=r"stale weights.*check the transfer of weights"):
        make_job().tune(tmp_path / "records")
    finding = read_findings(tmp_path / "records" / "run")[-1]
    assert (finding.step, finding.check) == (2, "logprob_gap")
    assert "stale weights" in finding.message
