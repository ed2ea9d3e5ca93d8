"""Coding agents from PyPI and npm, as tutorial/example_harnesses runs them, with scripted answers.

`.ci/harnesses FOLDER` installs them; the tests of those that are not in $ASTUNER_HARNESSES/bin or on the PATH are
skipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.config.loading import load_config
from astuner.config.root import AstunerConfig
from astuner.context_tracker.audit import certificate
from astuner.model_tuner.targets import FrozenModel, Targets
from astuner.schema import Episode, Task
from astuner.task_judge.judge_base import BaseJudge
from tests.workflows.command.programs import run_command
from tutorial.example_harnesses.judge import AnswerFileAsJudge

pytestmark = pytest.mark.harness

FOLDER = Path(__file__).parents[3] / "tutorial/example_harnesses"
TASK = Task("t0", "Write the sum of 17 and 25 to the file answer.txt, in digits.", metadata={"answer": 42})
SHELL = "printf 42 > answer.txt"


def call(name: str, **arguments: Any) -> str:
    """Return a tool call as the model writes it."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def in_order(*answers: str) -> Callable[[str], str]:
    """Return a script that gives the answers one after another."""
    pending: Iterator[str] = iter(answers)
    return lambda prompt: next(pending, answers[-1])


def with_side_calls(main: Callable[[str], str], **sides: str) -> Callable[[str], str]:
    """Return a script that answers a prompt with the text of the first side in it, or else with the main script."""

    def answer(prompt: str) -> str:
        return next((text for words, text in sides.items() if words.replace("_", " ") in prompt), "") or main(prompt)

    return answer


@pytest.fixture
def _on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = os.environ.get("ASTUNER_HARNESSES")
    if folder:
        monkeypatch.setenv("PATH", f"{folder}/bin{os.pathsep}{os.environ['PATH']}")


def run_harness(tokenizer: Any, name: str, program: str, answer: Callable[[str], str]) -> Episode:
    """Run one episode of a harness with the section of its YAML file."""
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed; .ci/harnesses installs it")
    config: AstunerConfig = load_config(FOLDER / f"{name}.yaml", []).config.astuner
    judge: BaseJudge = AnswerFileAsJudge(config.task_judge)
    frozen = {tag: FrozenModel() for tag in config.rollout.frozen_models}
    trainable = config.rollout.trainable_targets
    targets = Targets(None if trainable is None else tuple(trainable), frozen, config.workflow.agents)
    section = config.workflow.model_dump(exclude_unset=True)
    (episode,) = run_command(
        tokenizer, FOLDER, judge=judge, tasks=[TASK], answer=answer, targets=targets, timeout=180, **section
    )
    assert episode.error is None, episode.metadata
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 1.0, True), episode.metadata
    assert certificate([c for c in episode.calls if c.trained], episode.samples) == 1.0
    assert not re.search(r'"answer": 42', "".join(str(call.messages) for call in episode.calls))
    return episode


ONE_TOOL_CALL = {
    "mini_swe_agent": ("mini", call("bash", command=SHELL)),
    "qwen_code": ("qwen", call("run_shell_command", command=SHELL, description="write", is_background=False)),
    "codex": ("codex", call("exec_command", cmd=SHELL)),
    "pi": ("pi", call("bash", command=SHELL)),
    "continue": ("cn", call("Bash", command=SHELL)),
    "cline": ("cline", call("run_commands", commands=[SHELL])),
}


@pytest.mark.usefixtures("_on_path")
@pytest.mark.parametrize("name", ONE_TOOL_CALL)
def test_a_tool_call_and_an_answer(tokenizer: Any, name: str) -> None:
    program, tool_call = ONE_TOOL_CALL[name]
    submit = call("bash", command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")
    last = submit if name == "mini_swe_agent" else "It is done."
    episode = run_harness(tokenizer, name, program, in_order(tool_call, last))
    assert len(episode.calls) == 2
    assert len({call.agent_name for call in episode.calls}) == 1
    assert len(episode.samples) == 1, [call.fork for call in episode.calls]
    assert episode.calls[0].messages[-1]["tool_calls"]
    # Instructions of the harness, of any role, reach the model.
    system = next(message for message in episode.calls[0].messages if message["role"] in ("system", "developer"))
    prompt = tokenizer.decode(list(episode.calls[0].prompt_ids))
    assert str(system["content"])[:200].strip() in prompt


@pytest.mark.usefixtures("_on_path")
def test_aider_edits_a_file(tokenizer: Any) -> None:
    episode = run_harness(tokenizer, "aider", "aider", in_order("answer.txt\n```\n42\n```\n"))
    assert [call.agent_name for call in episode.calls] == [episode.calls[0].agent_name]


@pytest.mark.usefixtures("_on_path")
def test_smolagents_runs_code(tokenizer: Any) -> None:
    code = "Thought: write it\n<code>\nimport os\nos.system('printf 42 > answer.txt')\nfinal_answer('done')\n</code>"
    episode = run_harness(tokenizer, "smolagents", "smolagent", in_order(code))
    assert len(episode.calls) == 1


@pytest.mark.usefixtures("_on_path")
def test_opencode_names_its_title_and_its_subagent(tokenizer: Any) -> None:
    delegate = call("task", description="write", prompt="Write 42 to answer.txt", subagent_type="general")
    main = in_order(delegate, call("bash", command=SHELL, description="write"), "It is written.", "It is done.")
    episode = run_harness(tokenizer, "opencode", "opencode", with_side_calls(main, You_are_a_title_generator="A title"))
    names = [call.agent_name for call in episode.calls]
    assert names.count("title") == 1
    assert len(names) == 5
    assert [call.trained for call in episode.calls if call.agent_name == "title"] == [False]
    assert all(call.trained for call in episode.calls if call.agent_name != "title")


@pytest.mark.usefixtures("_on_path")
def test_qwen_code_names_its_subagent(tokenizer: Any) -> None:
    delegate = call("agent", description="write", prompt="Write 42 to answer.txt", subagent_type="general-purpose")
    shell = call("run_shell_command", command=SHELL, description="write", is_background=False)
    episode = run_harness(tokenizer, "qwen_code", "qwen", in_order(delegate, shell, "It is written.", "It is done."))
    names = [call.agent_name for call in episode.calls]
    assert names[0] == names[-1] == "qwen-code"
    assert len(set(names)) == 2
