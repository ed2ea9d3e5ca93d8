"""The generation of tasks against a real HTTP endpoint: the pipeline, faults, the budget, and a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from astuner.cli.main import astuner
from astuner.config.task_sources import DataGenerationConfig
from astuner.errors import ConfigError, JudgeBudgetError, JudgeUnavailableError, TaskDataError
from astuner.task_sources.data_generation import GenerationReport, generate_tasks
from tests.task_judge.llm.scripted_endpoint import Reply, Request, ScriptedEndpoint, scripted_endpoint
from tests.task_sources.data_generation.conftest import KEY, facts_document, helper_model, kind


def section(folder: Path, url: str, llm: dict[str, Any] | None = None, **fields: Any) -> DataGenerationConfig:
    document = folder / "facts.md"
    if not document.exists():
        document.write_text(facts_document(12))
    defaults = {
        "document_reader": {"document_path": [str(document)], "chunk_size": 160},
        "task_num": 8,
        "tasks_per_request": 2,
        "train_output_path": str(folder / "out" / "training.jsonl"),
        "validation_output_path": str(folder / "out" / "validation.jsonl"),
        "validation_share": 0.25,
        "alien_llm_model": "helper",
        "deduplication": {"threshold": 1.0},
        "llm": {"base_url": url, "cache_dir": str(folder / "cache"), **(llm or {})},
    }
    return DataGenerationConfig.model_validate(defaults | fields)


def generate(config: DataGenerationConfig) -> GenerationReport:
    return generate_tasks(config, base_dir=Path.cwd(), search=())


def rows(config: DataGenerationConfig, name: str = "training") -> list[dict[str, str]]:
    text = (Path(config.train_output_path).parent / f"{name}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def kinds(endpoint: ScriptedEndpoint) -> Counter[str]:
    return Counter(map(kind, endpoint.requests))


def test_tasks_are_generated_verified_filtered_and_split(tmp_path: Path) -> None:
    examples = tmp_path / "examples.jsonl"
    examples.write_text(json.dumps({"question": "What is the capital of Land0?", "answer": "City0"}) + "\n")
    with scripted_endpoint(helper_model()) as endpoint:
        rubrics = [{"type": "llm_evaluate", "custom_rubrics": "Drop questions about Land1."}]
        config = section(tmp_path, endpoint.base_url, example_path=str(examples), filters=rubrics)
        report = generate(config)
        training, validation = rows(config), rows(config, "validation")
        assert (report.training, report.validation) == (len(training), len(validation)) == (6, 2)
        for row in (*training, *validation):
            number = row["question"].removeprefix("What is the capital of Land").removesuffix("?")
            assert row["answer"] == f"City{number}"
            assert number not in ("0", "1")  # an example, and rejected by the rubrics
        assert not {row["source"] for row in training} & {row["source"] for row in validation}
        assert report.left_out["rejected by llm_evaluate"] == 1
        assert report.left_out["similar to an earlier task or an example"] >= 1
        assert "style and the difficulty of these examples" in endpoint.requests[0].text
        assert report.usage.requests == len(endpoint.requests)
        # The files are complete, so nothing is asked again; another number of tasks reuses the answers.
        before = len(endpoint.requests)
        assert generate(config).reused
        assert len(endpoint.requests) == before
        more = generate(config.model_copy(update={"task_num": 9}))
        assert (more.training + more.validation, more.reused) == (9, False)
        assert 0 < len(endpoint.requests) - before <= 8
    assert {request.key for request in endpoint.requests} == {KEY}
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and KEY.encode() in path.read_bytes()]


def test_tasks_that_the_text_does_not_answer_are_left_out(tmp_path: Path) -> None:
    def invent(what: str, answer: Any) -> Any:
        if what == "generate":
            answer["tasks"][0] = {"question": "What is the capital of Nowhere?", "answer": "Void"}
            answer["tasks"][1:] = [{**task, "answer": "Wrongtown"} for task in answer["tasks"][1:2]] + answer["tasks"][
                2:
            ]
        return answer

    with scripted_endpoint(helper_model(invent)) as endpoint:
        report = generate(section(tmp_path, endpoint.base_url, tasks_per_request=3, task_num=2))
        assert report.left_out["not answerable"] >= 1
        assert report.left_out["answered differently by the verification"] >= 1
        # The model that verifies does not see the answer.
        solving = [request.text for request in endpoint.requests if kind(request) == "solve"]
        assert solving
        assert not any("Wrongtown" in text for text in solving)


def test_generation_from_examples_only(tmp_path: Path) -> None:
    examples = tmp_path / "examples.json"
    examples.write_text(json.dumps([{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(9)]))
    numbers = iter(range(10, 99))

    def add(request: Request) -> Reply:
        new = [next(numbers) for _ in range(2)]
        return Reply(json.dumps({"tasks": [{"question": f"What is {n} + {n}?", "answer": str(2 * n)} for n in new]}))

    with scripted_endpoint(add) as endpoint:
        changes = {"document_reader": {}, "example_path": str(examples), "verify": False, "task_num": 4}
        config = section(tmp_path, endpoint.base_url, **changes)
        assert generate(config).training + generate(config).validation == 4
        assert "- What is 10 + 10?" in endpoint.requests[1].text


def test_duplicates_by_embeddings(tmp_path: Path) -> None:
    answers = helper_model()

    def embed(request: Request) -> Reply:
        if "input" not in request.body:
            return answers(request)
        # The same direction for even and for odd numbers.
        numbers = [int("".join(filter(str.isdigit, text)) or 0) for text in request.body["input"]]
        data = [{"index": i, "object": "embedding", "embedding": [2.0 * (n % 2), 3.0 * (n % 2 == 0)]}
                for i, n in enumerate(numbers)]  # fmt: skip
        return Reply(body=json.dumps({"object": "list", "model": "e", "data": data}).encode())

    with scripted_endpoint(embed) as endpoint:
        deduplication = {"method": "embeddings", "threshold": 0.9, "embedding_model": "e"}
        config = section(tmp_path, endpoint.base_url, deduplication=deduplication, max_rounds=1)
        report = generate(config)
        assert report.training + report.validation == 2
        asked = [text for request in endpoint.requests if "input" in request.body for text in request.body["input"]]
        assert len(asked) == len(set(asked))


def test_temporary_errors_of_the_endpoint_are_retried(tmp_path: Path) -> None:
    answers, lock, seen = helper_model(), threading.Lock(), Counter[str]()
    garbage = [Reply("no JSON"), Reply(body=b"<html>"), Reply('{"tasks": []}')]
    faults = [Reply(status=429, headers={"retry-after": "0"}), Reply(status=500), *garbage]

    def faulty(request: Request) -> Reply:
        with lock:
            seen[request.text] += 1
            return faults[seen.total() % len(faults)] if seen[request.text] == 1 else answers(request)

    with scripted_endpoint(faulty) as endpoint:
        config = section(tmp_path, endpoint.base_url, llm={"max_retries": 9, "deadline": 600, "request_timeout": 300})
        report = generate(config)
        assert report.training + report.validation == 8
        assert report.usage.failed_requests > 0


@pytest.mark.parametrize(
    ("reply", "llm", "problem"),
    [
        (Reply(status=500), {"max_retries": 1}, "status 500"),
        (Reply("garbage"), {"max_reasks": 0}, "is not as requested"),
        (Reply(hang=True), {"request_timeout": 0.2, "max_retries": 0}, "request_timeout"),
        (Reply(body=b""), {"max_retries": 0}, "not a chat completion"),
    ],
)
def test_permanent_errors_of_the_endpoint_are_named(
    tmp_path: Path, reply: Reply, llm: dict[str, Any], problem: str
) -> None:
    with scripted_endpoint(lambda _: reply) as endpoint:
        config = section(tmp_path, endpoint.base_url, llm=llm, max_rounds=1)
        with pytest.raises(TaskDataError, match=rf"no task could be generated from \d+ chunks: .*{problem}") as caught:
            generate(config)
    assert KEY not in str(caught.value)
    assert not Path(config.train_output_path).exists()


def test_rejected_keys_stop_the_generation(tmp_path: Path) -> None:
    with (
        scripted_endpoint(lambda _: Reply(status=401)) as endpoint,
        pytest.raises(JudgeUnavailableError) as caught,
    ):
        generate(section(tmp_path, endpoint.base_url))
    assert KEY not in str(caught.value)


def test_the_budget_counts_earlier_processes(tmp_path: Path) -> None:
    with scripted_endpoint(helper_model()) as endpoint:
        budget = {"max_tokens": 100, "max_concurrent_requests": 1}
        with pytest.raises(JudgeBudgetError, match="allows 100"):
            generate(section(tmp_path, endpoint.base_url, llm=budget))
        before = len(endpoint.requests)
        with pytest.raises(JudgeBudgetError, match="allows 100"):
            generate(section(tmp_path, endpoint.base_url, llm=budget))
        assert len(endpoint.requests) == before
        report = generate(section(tmp_path, endpoint.base_url, llm={"max_tokens": 100_000}))
        assert report.usage.requests == len(endpoint.requests)
        questions = [request.text for request in endpoint.requests]
        assert len(questions) == len(set(questions))  # nothing was paid twice


def test_a_section_without_documents_and_examples_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither documents nor examples"):
        generate(section(tmp_path, "http://127.0.0.1:9", document_reader={}))


def test_a_killed_generation_continues_without_paying_again(tmp_path: Path) -> None:
    answers, held = helper_model(), threading.Event()

    def slow(request: Request) -> Reply:
        # The first process is killed at its tenth request, which gets no answer.
        if len(endpoint.requests) == 10:
            held.set()
            return Reply(hang=True)
        return answers(request)

    with scripted_endpoint(slow) as endpoint:
        config = section(tmp_path, endpoint.base_url, llm={"max_concurrent_requests": 1, "request_timeout": 600,
                                                           "deadline": 1200})  # fmt: skip
        path = tmp_path / "run.yaml"
        run = {"model": {"path": "m"}, "rollout": {"agentscope_workflow": "a->B"}}
        reader = {"type": "data_generation", "data_generation": config.model_dump(mode="json")}
        path.write_text(json.dumps({"astuner": {**run, "task_reader": reader}}))
        process = subprocess.Popen([sys.executable, "-m", "astuner", "generate", "--conf", str(path)])
        try:
            assert held.wait(300)
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()
        assert not Path(config.train_output_path).exists()
        assert astuner.main(["generate", "--conf", str(path)], standalone_mode=False) in (None, 0)
        questions = [request.text for request in endpoint.requests]
    assert len(rows(config)) + len(rows(config, "validation")) == 8
    # Only the request that was not answered was sent twice.
    assert {text for text in questions if questions.count(text) > 1} == {questions[9]}
