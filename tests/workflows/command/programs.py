"""Programs that the tests run as agents, and the rollout that runs them."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from astuner.config.workflow import WorkflowConfig
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.targets import Targets
from astuner.schema import Episode, Task
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from astuner.workflows.command.program import AgentProgram
from astuner.workflows.command.workflow import CommandWorkflow
from tests.scripted_engine import ScriptedEngine

CALL = """
import json, os, urllib.request

def call(text="hi", system=None, **fields):
    messages = [{"role": "system", "content": system}] if system else []
    messages.append({"role": "user", "content": text})
    body = {"model": os.environ["OPENAI_MODEL"], "messages": messages, **fields}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request) as response:
        return json.load(response)["choices"][0]["message"]["content"]
"""
"""The beginning of a program that calls the model with the standard library only."""


def write_program(folder: Path, code: str, name: str = "agent.py") -> Path:
    """Write a Python program that can be executed, and return it."""
    path = folder / name
    path.write_text(f"#!{sys.executable}\n{CALL}\n{code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run_command(
    tokenizer: Any,
    folder: Path,
    *,
    judge: BaseJudge | None = None,
    tasks: Sequence[Task] = (Task("t0", "What is 1 + 1?", metadata={"answer": "2"}),),
    answer: Callable[[str], str] = lambda prompt: "2",
    settings: CallSettings | None = None,
    timeout: float = 60,
    targets: Targets | None = None,
    repeats: int = 1,
    **section: Any,
) -> list[Episode]:
    """Run the program of a `workflow` section in episodes with scripted answers, and return the episodes.

    Args:
        tokenizer: the tokenizer of the model.
        folder: the folder of the project.
        judge, targets: as in `TaskRunner`.
        tasks, repeats: the tasks, and the episodes of each.
        answer: returns the answer to the text of a prompt.
        settings: of the calls.
        timeout: of an episode, in seconds.
        section: the keys of the section.
    """

    def script(prompt_ids: Sequence[int], params: Any) -> list[int]:
        ids: list[int] = tokenizer.encode(answer(tokenizer.decode(list(prompt_ids))), add_special_tokens=False)
        return [*ids, *tokenizer.encode("<|im_end|>", add_special_tokens=False)][: params.max_tokens]

    program = AgentProgram.of(WorkflowConfig(**section), [folder], has_judge=judge is not None)
    runner = TaskRunner(
        lambda: CommandWorkflow(program),
        judge,
        ScriptedEngine(script, max_model_len=65536),
        ChatCodec(tokenizer, "default"),
        episode_timeout=timeout,
        targets=targets or Targets(agents=section.get("agents", {})),
    )
    rollout = TaskRollout(EpisodesHere(runner))
    lengths = {"max_model_len": 65536, "max_prompt_length": 60000, "max_response_length": 60000}
    request = BatchRequest(tasks, repeats, "train", 0, 0, settings or CallSettings(**lengths))
    try:
        return rollout.run(request)
    finally:
        rollout.close()


def run_code(tokenizer: Any, folder: Path, code: str, **options: Any) -> Episode:
    """Run one episode of a Python program."""
    write_program(folder, code)
    (episode,) = run_command(tokenizer, folder, **{"command": ["python", "agent.py"], **options})
    return episode


def is_running(pid: int) -> bool:
    """Return whether a process runs and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return os.path.exists(f"/proc/{pid}/stat")
