"""`astuner chat`: lines of stdin are answered by the model of a run, or by a configured agent that uses it."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from astuner.cli.main import astuner as command
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import Completion, SamplingParams
from tests.launcher.conftest import Command


def chat(*words: str, typed: str) -> Result:
    return CliRunner().invoke(command, ["chat", *words], input=typed)


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The prompts that the engine gets."""
    seen: list[tuple[int, ...]] = []
    generate = EmbeddedEngine.generate

    async def record(engine: EmbeddedEngine, prompt_ids: tuple[int, ...], params: SamplingParams) -> Completion:
        seen.append(tuple(prompt_ids))
        return await generate(engine, prompt_ids, params)

    monkeypatch.setattr(EmbeddedEngine, "generate", record)
    return seen


def test_the_model_of_a_run_sees_the_whole_conversation(
    train: Command, folder: Path, prompts: list[tuple[int, ...]]
) -> None:
    assert train("trainer_common.total_training_steps=1").code == 0
    prompts.clear()
    result = chat("--model", "run", "--max-tokens=4", typed="first\n\nsecond\n/new\nfirst\n")
    assert result.exit_code == 0, result.output
    first, second, again = prompts
    assert again == first
    assert second[: len(first)] == first
    assert len(second) > len(first) + 4
    answers = result.stdout.splitlines()
    assert answers[0] == answers[-1]  # greedy
    with_system = chat("--model=run", "--max-tokens=4", "--system=You are brief.", typed="first\n")
    assert with_system.exit_code == 0
    assert len(prompts[-1]) > len(first)


def test_a_question_that_is_too_long_does_not_end_the_chat(train: Command, folder: Path) -> None:
    train("trainer_common.total_training_steps=1")
    result = chat("--model=run", "--max-tokens=4", typed=f"{'long ' * 2000}\nshort\n")
    assert result.exit_code == 0
    error, *answer = result.stdout.splitlines()
    assert error.startswith("error: ")
    assert answer


def test_a_configured_agent_answers_each_question_as_a_task(train: Command, folder: Path) -> None:
    train("trainer_common.total_training_steps=1")
    result = chat("--model=run", "--conf=run.yaml", typed="What is this?\nAnd that?\n")
    assert result.exit_code == 0, result.output
    lines = [line.split(maxsplit=1) for line in result.stdout.splitlines()]
    assert [line[1] for line in lines if line[:1] == ["user"]] == ["What is this?", "And that?"]
    assert sum(line[:1] == ["assistant"] for line in lines) == 2
    assert "reward" not in result.stdout
    assert "error" not in result.stdout


def test_invalid_options_are_errors(
    train: Command, astuner: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    astuner("chat", "--model=run").says("'run' is not a run", "there are no runs yet")
    astuner("chat", "--model=./nothing").says("--model is './nothing', which does not exist")
    assert astuner("chat", "--model=run", "--conf=run.yaml", "--temperature=1").code == 2
    assert astuner("--conf", "run.yaml", "--backbone=debug").code == 0
    astuner("chat", "--model=run-debug").says("the run 'run-debug' has no model yet", "pass --model")
