"""Whole runs whose judge asks an LLM: faults of its endpoint, the budget, groups, and keys that must not leak."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.errors import JudgeBudgetError, JudgeUnavailableError
from astuner.run_record import read_index, read_metrics
from tests.task_judge.llm.scripted_endpoint import Reply, Request, ScriptedEndpoint
from tests.task_judge.llm.test_judges import fenced, longest_first

AGENTS = Path(__file__).parent / "judged_agents.py"
KEYS = ("sk-canary-first-1111", "sk-canary-second-2222", "sk-canary-backup-3333")
RUBRIC = "astuner.task_judge.llm.rubric_judge->RubricJudge"
RANKING = "astuner.task_judge.llm.comparisons->GroupRankingJudge"
MakeRun = Callable[..., tuple[AstunerJob, ScriptedEndpoint]]


@pytest.fixture
def make_run(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeRun]:
    """Return a function that makes a job of 2 steps of 2 tasks × 3 episodes, and the endpoint of its judge."""
    monkeypatch.setenv("DASHSCOPE_API_KEY", "|".join(KEYS[:2]))
    monkeypatch.setenv("DASHSCOPE_API_KEY_BACKUP", KEYS[2])
    endpoints: list[ScriptedEndpoint] = []

    def make(answer: Callable[[Request], Reply], judge: str = RUBRIC, **settings: Any) -> tuple[AstunerJob, Any]:
        rows = [{"question": f"question {i}", "answer": "no"} for i in range(4)]
        (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        endpoints.append(endpoint := ScriptedEndpoint(answer))
        values: dict[str, Any] = {
            "experiment_name": "run",
            "model__renderer": "qwen3",
            "data__train_batch_size": 2,
            "rollout__num_repeat": 3,
            "rollout__max_env_worker": 2,
            "rollout__temperature": 1.0,
            "rollout__max_response_length_in_one_turn": 6,
            "rollout__max_model_len": 256,
            "rollout__compute_madness_checklist": [],
            "trainer_common__total_training_steps": 2,
            "trainer_common__use_kl_loss": False,
            "trainer_common__val_before_train": False,
            "task_judge__judge_protocol": judge,
            "task_judge__llm__base_url": endpoint.base_url,
            "task_judge__llm__cache_dir": str(tmp_path / "cache"),
            "task_judge__llm__max_retries": 1,
            "task_judge__llm__max_reasks": 0,
        }
        job = AstunerJob(algorithm="grpo", model=model_folder, **(values | settings))
        job.set_workflow(f"{AGENTS}->Answers")
        return job.set_data("file", tmp_path / "train.jsonl"), endpoint

    yield make
    for endpoint in endpoints:
        endpoint.close()


def by_length(request: Request) -> Reply:
    score = len(fenced(request, "answer to grade")) % 11
    return Reply(json.dumps({"reason": f"the key is {request.key}", "scores": {"score": score}}))


def assert_no_key_in(folder: Path) -> None:
    texts = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    assert [path for path, text in texts.items() if b"canary" in text] == []


def test_a_run_learns_from_the_scores_of_an_llm(make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    job, endpoint = make_run(by_length, task_judge__llm__input_price=1.0)
    job.tune(tmp_path / "records")
    (first, second) = [row for row in read_metrics(tmp_path / "records" / "run") if "reward/mean" in row.metrics]
    assert first.metrics["judge/llm_requests"] + first.metrics["judge/llm_cache_hits"] == pytest.approx(1)
    assert first.metrics["judge/llm_prompt_tokens"] == pytest.approx(10 * first.metrics["judge/llm_requests"])
    assert first.metrics["judge/llm_cost"] == pytest.approx(1e-5 * first.metrics["judge/llm_requests"])
    assert second.metrics["episodes/ok"] == 6
    assert len(endpoint.requests) <= 12
    assert_no_key_in(tmp_path)
    assert "canary" not in "".join(capfd.readouterr())


def test_faults_of_the_endpoint_leave_episodes_unscored_and_the_run_continues(make_run: MakeRun, tmp_path: Path):
    faults = [
        Reply(status=500, body=b'{"error": {"message": "out of order"}}'),
        Reply(body=b"garbage"),
        Reply('{"scores": "ten"}'),
    ]
    count = iter(range(10**6))

    def answer(request: Request) -> Reply:
        number = next(count)
        return faults[number // 2 % len(faults)] if number % 8 < 6 else by_length(request)

    job, _ = make_run(answer, task_judge__llm__cache=False, task_judge__llm__max_concurrent_requests=1)
    job.tune(tmp_path / "records")
    rows = [row.metrics for row in read_metrics(tmp_path / "records" / "run") if "reward/mean" in row.metrics]
    assert sum(row["episodes/unscored"] for row in rows) > 0
    for row in rows:
        assert row["episodes/ok"] + row["episodes/failed"] == 6
        assert row["episodes/failed"] == row["episodes/unscored"] == row["unscored/llm_no_answer"]
    assert_no_key_in(tmp_path)


def test_keys_that_expire_stop_the_run_with_the_cause_and_a_checkpoint(
    make_run: MakeRun, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    asked: list[str] = []

    def answer(request: Request) -> Reply:
        asked.append(request.key)
        if len(asked) <= 9:
            return by_length(request)
        return Reply(status=401, body=json.dumps({"error": {"message": f"expired: {request.key}"}}).encode())

    job, _ = make_run(answer, task_judge__llm__cache=False)
    with pytest.raises(JudgeUnavailableError, match="rejected all 3 keys in DASHSCOPE_API_KEY"):
        job.tune(tmp_path / "records")
    assert_no_key_in(tmp_path)
    assert "canary" not in "".join(capfd.readouterr())
    assert list((tmp_path / "records" / "run" / "checkpoints").iterdir())


def test_the_budget_stops_the_run(make_run: MakeRun, tmp_path: Path):
    job, endpoint = make_run(by_length, task_judge__llm__cache=False, task_judge__llm__max_tokens=60)
    with pytest.raises(JudgeBudgetError, match=r"task_judge\.llm\.max_tokens allows 60"):
        job.tune(tmp_path / "records")
    assert 4 <= len(endpoint.requests) <= 6
    assert_no_key_in(tmp_path)


def test_the_episodes_of_a_task_are_ranked(make_run: MakeRun, tmp_path: Path):
    job, _ = make_run(longest_first, RANKING)
    job.tune(tmp_path / "records")
    rows = [row.metrics for row in read_metrics(tmp_path / "records" / "run") if "reward/mean" in row.metrics]
    assert [row["episodes/ok"] for row in rows] == [6, 6]
    for entry in read_index(tmp_path / "records" / "run"):
        assert entry.reward in (0.0, 0.5, 1.0)
