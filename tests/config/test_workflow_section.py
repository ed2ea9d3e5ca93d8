"""Section `workflow`: what a command may be, and what excludes what."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.config.loading import load_config
from astuner.config.root import RunConfig
from astuner.errors import ConfigError

RUN = """
astuner:
  model: {path: some/model}
  task_reader: {type: dataset_file, dataset_file: {training: {file_path: tasks.jsonl}}}
  workflow: {SECTION}
"""


def load(tmp_path: Path, section: str, *overrides: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("{SECTION}", section))
    return load_config(path, list(overrides)).config


def test_a_command_names_the_agent(tmp_path: Path) -> None:
    config = load(tmp_path, '{command: [python, agent.py, --turns, 3], env: {N: 1, J: \'{"a": {"b": 1}}\'}}')
    assert config.astuner.workflow.command == ["python", "agent.py", "--turns", "3"]
    assert config.astuner.workflow.env == {"N": "1", "J": '{"a": {"b": 1}}'}


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ("{command: []}", r"astuner.workflow.command.*expected a list with one item per word"),
        ("{command: python my_agent.py}", r"write \[python, my_agent.py\]"),
        ("{command: 'python \"x'}", r"expected a list with one item per word"),
        ("{command: ''}", r"expected a list with one item per word"),
        ("{command: ['', x]}", r"its first word is empty"),
        ("{command: {a: b}}", r"workflow.command"),
        ("{command: [[python]]}", r"workflow.command"),
        ("{command: [python, '{query}']}", r"no placeholder {query}; did you mean {main_query}\?"),
        ("{command: [python, '{task-id} {taskid}']}", r"no placeholder {taskid}; did you mean {task_id}\?"),
        ("{command: [python, '{metadat.x}']}", r"no placeholder {metadat.x}; did you mean"),
        ("{command: [python], env: {'A=B': x}}", r"expected the name of an environment variable"),
        ("{command: [python], agents: {a: ''}}", r"workflow.agents"),
        ("{command: [python], max_output_bytes: 0}", r"max_output_bytes"),
        ("{comand: [python]}", r"did you mean 'astuner.workflow.command'"),
        ("{}", r"the workflow to tune is missing; add `agentscope_workflow.*or `command: \[python, my_agent.py\]`"),
        ("agent.py->Agent", r"workflow"),
    ],
)
def test_mistakes_are_errors(tmp_path: Path, section: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, section)


@pytest.mark.parametrize("text", ["${HOME}", "{print $1}", "{}", "{0}", "{a, b}", '{"model": "{model}"}', "{HOME}"])
def test_other_braces_are_kept(tmp_path: Path, text: str) -> None:
    escaped = text.replace("${", r"\${")  # otherwise, OmegaConf would look for a key
    config = load(tmp_path, "{command: [sh, -c, '" + escaped + "']}")
    assert config.astuner.workflow.command == ["sh", "-c", text]


def test_a_workflow_and_a_command_exclude_each_other(tmp_path: Path) -> None:
    override = "astuner.rollout.agentscope_workflow='agent.py->Agent'"
    with pytest.raises(ConfigError, match=r"agentscope_workflow \(agent.py->Agent\) and astuner.workflow.command both"):
        load(tmp_path, "{command: [python]}", override)


def test_keys_without_a_command_have_no_effect(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(RUN.replace("{SECTION}", "{files: [data]}"))
    loaded = load_config(path, ["astuner.rollout.agentscope_workflow='agent.py->Agent'"])
    assert any("no effect while workflow.command is null: astuner.workflow.files" in text for text in loaded.notices)
