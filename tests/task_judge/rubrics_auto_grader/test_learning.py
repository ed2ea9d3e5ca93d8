"""Learning of rubrics against a scripted grading model."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner import WorkflowOutput, WorkflowTask
from astuner.config.data import TaskJudgeConfig
from astuner.errors import ConfigError, JudgeError, TaskDataError
from astuner.schema import Task, TaskSet
from astuner.task_judge.rubrics_auto_grader.grader import Rubrics, make_grader
from astuner.task_judge.rubrics_auto_grader.learning import load_or_learn_rubrics, reference_samples
from tests.task_judge.llm.scripted_endpoint import Reply, Request, ScriptedEndpoint

VAGUE, CLEAR = "The answer is good.", "The answer gives reasons with the word because."


def graded(request: Request) -> float:
    """A grading model that tells right answers (`… because …`) only by the clear rubric."""
    answer = request.text.split("===== answer to grade", 1)[1]
    return 1.0 if VAGUE in request.text or "because" in answer else 0.0


class GradingModel:
    """Proposes the vague rubric, and revises it to the clear one."""

    def __init__(self) -> None:
        self.asked: Counter[str] = Counter()
        self.texts: list[str] = []

    def __call__(self, request: Request) -> Reply:
        self.texts.append(request.text)
        kind = next(kind for kind, text in _KINDS.items() if text in request.text)
        self.asked[kind] += 1
        return Reply(json.dumps(getattr(self, kind)(request)))

    def propose(self, request: Request) -> Mapping[str, Any]:
        return {"rubrics": [VAGUE, f"The answer is of type {len(request.text) % 2}."]}

    def merge(self, request: Request) -> Mapping[str, Any]:
        return {"rubrics": [VAGUE]}

    def categorize(self, request: Request) -> Mapping[str, Any]:
        return {"categories": [{"name": "Quality", "rubrics": [VAGUE, "It is short."]}]}

    def refine(self, request: Request) -> Mapping[str, Any]:
        return {"rubrics": [CLEAR]}

    def grade(self, request: Request) -> Mapping[str, Any]:
        return {"reason": "", "scores": {"score": graded(request)}}

    def rank(self, request: Request) -> Mapping[str, Any]:
        answers = re.findall(r"===== answer \d+ \w+ =====\n(.*?)\n", request.text)
        order = list(range(1, len(answers) + 1))
        if VAGUE not in request.text:
            order.sort(key=lambda number: "because" not in answers[number - 1])
        return {"ranking": order}


_KINDS = {
    "propose": "You write criteria",
    "merge": "overlap",
    "categorize": "in categories",
    "refine": "graded some answers wrongly",
    "grade": "You grade the answer",
    "rank": "You rank",
}


def tasks(count: int = 8, **more: Any) -> TaskSet:
    rows = [
        {"main_query": f"Why {i}?", "answer": f"{i} because", "final_answer": f"{i} is so", "score": 0.0} | more
        for i in range(count)
    ]
    return TaskSet(tuple(Task(f"t{i}", f"Why {i}?", metadata=row) for i, row in enumerate(rows)), ())


Configure = Callable[..., TaskJudgeConfig]


@pytest.fixture
def model() -> GradingModel:
    return GradingModel()


@pytest.fixture
def configure(model: GradingModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Configure]:
    for name in ("DASHSCOPE_API_KEY", "OPENAI_API_KEY", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    endpoint = ScriptedEndpoint(model)

    def make(**settings: Any) -> TaskJudgeConfig:
        llm = {"base_url": endpoint.base_url, "cache_dir": str(tmp_path / "cache")}
        return TaskJudgeConfig.model_validate(
            {"judge_type": "rubrics_auto_grader", "llm": llm, "rubrics_auto_grader": settings}
        )

    yield make
    endpoint.close()


@pytest.mark.parametrize("mode", ["pointwise", "listwise"])
def test_rubrics_are_revised_until_they_agree_with_the_references(
    mode: str, configure: Configure, model: GradingModel, tmp_path: Path
):
    path = tmp_path / "rubrics.yaml"
    config = configure(grader_mode=mode, max_epochs=5, rubrics_path=str(path), grader_name="reasons")
    rubrics = load_or_learn_rubrics(config, tasks())
    assert (rubrics.rubrics, rubrics.agreement, rubrics.epochs) == ((CLEAR,), 1.0, 2)
    assert (rubrics.samples, rubrics.held_out) == (6, 4 if mode == "pointwise" else 2)
    assert model.asked["refine"] == 1
    assert yaml.safe_load(path.read_text())["rubrics"] == [CLEAR]
    before = model.asked.total()
    assert load_or_learn_rubrics(config, tasks()) == rubrics
    assert model.asked.total() == before


def test_the_agreement_of_rubrics_that_are_not_revised_is_reported(configure: Configure):
    rubrics = load_or_learn_rubrics(configure(max_epochs=1), tasks())
    assert (rubrics.rubrics[0], rubrics.agreement, rubrics.epochs) == (VAGUE, 0.5, 1)


def test_the_rubrics_of_equal_samples_and_settings_are_learned_once(configure: Configure, model: GradingModel):
    load_or_learn_rubrics(configure(), tasks())
    before = model.asked.total()
    load_or_learn_rubrics(configure(), tasks())
    assert model.asked.total() == before
    load_or_learn_rubrics(configure(max_epochs=1), tasks())
    load_or_learn_rubrics(configure(), tasks(count=6))
    assert model.asked.total() > before


@pytest.mark.parametrize(
    ("settings", "rubrics", "asked"),
    [
        ({"aggregation_mode": "keep_all", "generate_number": 1}, (VAGUE,), {"propose": 6}),
        ({"aggregation_mode": "merge_similar", "generate_number": 2}, (VAGUE,), {"propose": 6, "merge": 1}),
        (
            {"aggregation_mode": "categorize", "generate_number": 2},
            (f"Quality: {VAGUE} It is short.",),
            {"propose": 6, "categorize": 1},
        ),
        ({"sampling_mode": "smart", "generate_number": 1, "num_reference_samples": 16}, (VAGUE,), {"propose": 8}),
        ({"sampling_mode": "all_samples", "num_reference_samples": 16}, (VAGUE,), {"propose": 12}),
        ({"num_reference_samples": 4}, (VAGUE,), {"propose": 3}),
    ],
)
def test_settings_of_sampling_and_aggregation_apply(
    settings: dict[str, Any], rubrics: tuple[str, ...], asked: dict[str, int], configure: Configure, model: GradingModel
):
    learned = load_or_learn_rubrics(
        configure(max_epochs=1, **settings), tasks(settings.get("num_reference_samples", 8))
    )
    assert learned.rubrics == rubrics
    assert {kind: model.asked[kind] for kind in ("propose", "merge", "categorize") if model.asked[kind]} == asked


async def grade(config: TaskJudgeConfig, rubrics: Rubrics, answer: str) -> tuple[float | None, bool | None]:
    grader = make_grader(config, rubrics)
    try:
        task = WorkflowTask(Task("t", "?", metadata={"main_query": "Why?"}), "e")
        result = await grader.compute_reward(
            task, WorkflowOutput(metadata={config.rubrics_auto_grader.answer_field: answer})
        )
        return result.reward, result.is_success
    finally:
        grader.close()


async def test_the_grader_gives_scores_in_the_range(configure: Configure, model: GradingModel):
    config = configure(max_score=4, success_threshold=3, answer_field="reply")
    rubrics = Rubrics(name="r", grader_mode="pointwise", rubrics=(CLEAR,))
    assert await grade(config, rubrics, "so it is, because") == (1.0, False)
    assert "from 0 (not met) to 4 (fully met)" in model.texts[-1]
    assert CLEAR in model.texts[-1]


async def test_listwise_rewards_are_in_the_range(configure: Configure):
    config = configure(grader_mode="listwise", min_score=-1, max_score=1, success_threshold=0.5)
    grader = make_grader(config, Rubrics(name="r", grader_mode="listwise", rubrics=(CLEAR,)))
    outputs = [WorkflowOutput(metadata={"final_answer": text}) for text in ("it is", "it is because")]
    results = await grader.compute_group_rewards(WorkflowTask(Task("t", "Why?"), "e"), outputs)  # type: ignore[attr-defined]
    grader.close()
    assert [(result.reward, result.is_success) for result in results] == [(-1.0, False), (1.0, True)]


async def test_a_custom_prompt_and_the_language_reach_the_model(configure: Configure, model: GradingModel):
    rubrics = Rubrics(name="r", grader_mode="pointwise", rubrics=(CLEAR,))
    prompt = "You grade the answer like a teacher: {rubrics} ({min_score}-{max_score})"
    await grade(configure(custom_evaluation_prompt=prompt), rubrics, "x")
    assert f"like a teacher: - score: 1. {CLEAR} (0-1)" in model.texts[-1]
    with pytest.raises(StopIteration):  # the scripted model knows no Chinese
        model(Request({"messages": [{"content": "请"}]}, ""))


def test_samples_without_a_wrong_answer_are_paired_with_each_other(configure: Configure):
    settings = configure().rubrics_auto_grader
    training, held_out = reference_samples(tasks(4, score=None, final_answer=None), settings)
    assert [sample.answers for sample in (*training, *held_out)] == [
        ((f"{i} because", 1.0), (f"{(i + 1) % 4} because", 0.0)) for i in range(4)
    ]
    assert (len(training), len(held_out)) == (3, 1)


def test_a_validation_split_is_the_held_out_part(configure: Configure):
    rows = tasks(6).training
    training, held_out = reference_samples(TaskSet(rows[:4], rows[4:]), configure().rubrics_auto_grader)
    assert [sample.question for sample in training] == [f"Why {i}?" for i in range(4)]
    assert [sample.question for sample in held_out] == ["Why 4?", "Why 5?"]


@pytest.mark.parametrize(
    ("task_set", "text"),
    [
        (tasks(1), "needs at least 2 reference samples, and there are 1"),
        (tasks(4, score=7), r"score 7; expected a number from min_score 0 to max_score 1"),
        (tasks(4, score=True), "score True; expected a number"),
        (tasks(4, answer=None, final_answer=None), "has neither 'answer' .* nor 'final_answer' with 'score'"),
    ],
)
def test_samples_that_cannot_be_used_are_errors(task_set: TaskSet, text: str, configure: Configure):
    with pytest.raises(TaskDataError, match=text):
        load_or_learn_rubrics(configure(), task_set)


def test_a_file_without_rubrics_is_an_error(configure: Configure, tmp_path: Path):
    path = tmp_path / "rubrics.yaml"
    path.write_text("name: x\ngrader_mode: pointwise\nrubrics: []\n")
    with pytest.raises(TaskDataError, match=r"rubrics\.yaml contains no rubrics \(rubrics: "):
        load_or_learn_rubrics(configure(rubrics_path=str(path)), tasks())


def test_rubrics_of_the_other_mode_are_an_error(configure: Configure):
    with pytest.raises(ConfigError, match=r"the rubrics of r are listwise, and .* is pointwise"):
        make_grader(configure(), Rubrics(name="r", grader_mode="listwise", rubrics=("a",)))


def test_a_model_that_gives_no_rubrics_ends_with_the_cause(configure: Configure, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GradingModel, "propose", lambda *_: {"rubrics": []})
    with pytest.raises(JudgeError, match=r"no rubrics could be learned: .*rubrics: List should have at least 1 item"):
        load_or_learn_rubrics(configure(), tasks())
