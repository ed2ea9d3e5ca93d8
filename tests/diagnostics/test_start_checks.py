"""Checks of the inputs of a run, each with the fault and without."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from astuner.diagnostics.monitor import all_checks, checks_of
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import EnvTask, Task, TaskSet
from tests.diagnostics.conftest import Evidence, found, make_task


def test_an_ordinary_start_has_no_finding(evidence: Evidence):
    start = evidence.start()
    assert [(check.name, list(check.find(start))) for check in checks_of("start")] == [
        (check.name, []) for check in checks_of("start")
    ]


def test_validation_tasks_among_the_training_tasks(evidence: Evidence):
    tasks = TaskSet((make_task(1), make_task(2)), (make_task(2), make_task(3), make_task(4)))
    ((message, fix),) = found("validation_in_training", evidence.start(tasks=tasks))
    assert message.startswith("1 of 3 validation tasks have the same question as a training task")
    assert "remove these tasks" in fix


def test_a_question_that_nearly_all_rows_share(evidence: Evidence):
    same = tuple(replace(make_task(n), main_query="Solve it.") for n in range(9))
    ((message, fix),) = found("duplicate_tasks", evidence.start(tasks=TaskSet(same, ())))
    assert "8 of 9 training tasks" in message
    assert "fields.main_query" in fix
    oversampled = tuple(make_task(n % 4) for n in range(12))
    assert found("duplicate_tasks", evidence.start(tasks=TaskSet(oversampled, ()))) == []


def test_an_instruction_that_the_tasks_of_an_environment_share_is_no_question(evidence: Evidence):
    def env_task(split: str, number: int, question: str) -> Task:
        return replace(make_task(number), main_query=question, env=EnvTask("lake", split, str(number)))

    validation = (env_task("validation", 9, "Cross the lake."),)
    training = tuple(env_task("train", number, "Cross the lake.") for number in range(9))
    assert found("validation_in_training", evidence.start(tasks=TaskSet(training, validation))) == []
    assert found("duplicate_tasks", evidence.start(tasks=TaskSet(training, validation))) == []
    # An environment of questions shows the task in the question.
    training = tuple(env_task("train", number, f"What is {number} + 1?") for number in range(9))
    validation = (env_task("validation", 9, "What is 3 + 1?"),)
    ((message, _),) = found("validation_in_training", evidence.start(tasks=TaskSet(training, validation)))
    assert message.startswith("1 of 1 validation tasks")


def test_reference_answers_that_are_empty(evidence: Evidence):
    tasks = tuple(make_task(n, answer="" if n % 3 else "4") for n in range(9))
    ((message, _),) = found("missing_references", evidence.start(tasks=TaskSet(tasks, ())))
    assert "'answer' is empty in 6 of 9" in message
    few = tuple(make_task(n, answer=None if n == 0 else "4") for n in range(9))
    assert found("missing_references", evidence.start(tasks=TaskSet(few, ()))) == []


@pytest.mark.parametrize(("value", "alarm"), [("1.0", True), ("False", True), (1.0, False), ("good", False)])
def test_a_reward_column_that_is_text(evidence: Evidence, value: Any, alarm: bool):
    tasks = tuple(make_task(n, reward=value) for n in range(4))
    assert bool(found("reward_column_is_text", evidence.start(tasks=TaskSet(tasks, ())))) == alarm


@pytest.mark.parametrize(("size", "alarm"), [(1001, True), (1000, False), (900, False), (400, True)])
def test_a_tokenizer_of_another_size(evidence: Evidence, size: int, alarm: bool):
    start = evidence.start()
    start = replace(start, model=replace(start.model, vocabulary=1000, tokenizer_size=size))
    assert bool(found("vocabulary_mismatch", start)) == alarm


def test_a_tokenizer_without_the_characters(evidence: Evidence):
    start = evidence.start()
    unknown = replace(start, template=replace(start.template, unknown_share=0.5))
    assert "50% of the tokens" in found("vocabulary_mismatch", unknown)[0][0]


def test_an_end_token_of_another_tokenizer(evidence: Evidence):
    start = evidence.start()
    other = replace(start, model=replace(start.model, end_ids=(17,)))
    ((message, fix),) = found("end_token_mismatch", other)
    assert "17" in message
    assert "eos_token_id" in fix


def changed_template(evidence: Evidence, template: str, **values: Any) -> ChatCodec:
    tokenizer = copy.deepcopy(evidence.codec.tokenizer)
    tokenizer.chat_template = template
    for name, value in values.items():
        setattr(tokenizer, name, value)
    return ChatCodec(tokenizer, {"name": "default", "tool_parser": "qwen3"})


def test_a_template_with_control_tokens_that_do_not_exist(evidence: Evidence):
    llama = (
        "{% for message in messages %}<|start_header_id|>{{ message.role }}<|end_header_id|>{{ message.content }}"
        "<|im_end|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>"
    )
    ((message, _),) = found("wrong_chat_template", evidence.start(changed_template(evidence, llama)))
    assert "<|end_header_id|>, <|start_header_id|>" in message


def test_a_template_without_the_users_message(evidence: Evidence):
    silent = "{% for message in messages %}<|im_start|>{{ message.role }}<|im_end|>{% endfor %}<|im_start|>assistant"
    ((message, _),) = found("wrong_chat_template", evidence.start(changed_template(evidence, silent)))
    assert "user's message" in message


def test_a_template_that_adds_a_second_bos(evidence: Evidence):
    template = "{{ bos_token }}" + evidence.codec.tokenizer.chat_template
    once = changed_template(evidence, template, bos_token="<|endoftext|>")
    assert found("doubled_bos", evidence.start(once)) == []
    twice = changed_template(evidence, "{{ bos_token }}" + template, bos_token="<|endoftext|>")
    assert "2 begin-of-sequence tokens" in found("doubled_bos", evidence.start(twice))[0][0]


@pytest.mark.parametrize("rollout", [{"temperature": 0.0}, {"top_k": 1}])
def test_greedy_sampling_in_training(evidence: Evidence, rollout: dict[str, Any]):
    config = {"rollout": rollout}
    assert "rollout.temperature to 0.7" in found("greedy_training", evidence.start(config=config))[0][1]
    assert found("greedy_training", evidence.start(config=config, trains=False)) == []
    assert found("greedy_training", evidence.start(config={"rollout": {"temperature": 0.2}})) == []


@pytest.mark.parametrize(("rate", "alarm"), [(0.9, True), (1e-2, False), (1e-6, False), (1e-16, True)])
def test_a_learning_rate_that_destroys_or_does_nothing(evidence: Evidence, rate: float, alarm: bool):
    config = {"trainer_common": {"optim": {"lr": rate}, "total_training_steps": 100}}
    assert bool(found("learning_rate", evidence.start(config=config))) == alarm


def test_the_name_of_each_check_is_unique():
    assert len({check.name for check in all_checks()}) == len(all_checks())


def test_a_model_without_readable_files_is_unknown(evidence: Evidence, tmp_path: Path):
    other = Evidence(evidence.codec.tokenizer, tmp_path)
    assert other.start().model.vocabulary is None
    assert found("vocabulary_mismatch", other.start()) == found("end_token_mismatch", other.start()) == []
