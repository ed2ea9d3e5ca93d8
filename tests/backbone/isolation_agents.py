"""Agents whose code harms the process that runs it. The question of a task selects what happens."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from decimal import getcontext
from pathlib import Path

import psutil

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.backbone.episode_workers.fork_server import SERVER_NAME
from astuner.schema import WorkflowOutput as Output
from astuner.task_judge.judge_base import BaseGroupJudge, BaseJudge


def segfault() -> None:
    ctypes.string_at(0)


def use_all_memory() -> None:
    """As the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def block_interpreter() -> None:
    ctypes.PyDLL(None).sleep(600)  # keeps the lock of the interpreter


def match_forever() -> None:
    re.match("(a+)+$", "a" * 60 + "b")


def kill_group() -> None:
    os.killpg(0, signal.SIGKILL)


def kill_parent() -> None:
    parent = psutil.Process(os.getppid())
    # If another episode has killed the fork server, the parent is the process of the tests.
    with contextlib.suppress(psutil.Error):
        if parent.name() == SERVER_NAME:
            parent.kill()


def exit_with_child() -> None:
    """A child that inherits every descriptor outlives the worker."""
    if os.fork() == 0:
        time.sleep(600)
    os._exit(3)


def close_everything() -> None:
    os.closerange(3, 4096)


def change_process() -> None:
    import torch

    torch.set_default_dtype(torch.float64)
    sys.setrecursionlimit(150)
    os.chdir("/")
    os.umask(0o777)
    os.environ["LEFT_BY_EPISODE"] = "1"
    warnings.simplefilter("error")
    getcontext().prec = 3
    resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    threading.excepthook = lambda args: None
    sys.path.clear()
    sys.stdout = None  # type: ignore[assignment]
    os.close(1)


def replace_functions_of_astuner() -> None:
    from astuner.backbone.episode_workers import process

    vars(process)["to_jsonable"] = None


HARM: dict[str, Callable[[], object]] = {
    "exit": lambda: os._exit(7),
    "exit in a thread": lambda: threading.Thread(target=os._exit, args=(9,)).start() or time.sleep(600),  # type: ignore[func-returns-value]
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT) or time.sleep(600),  # type: ignore[func-returns-value]
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "abort": os.abort,
    "segfault": segfault,
    "memory": use_all_memory,
    "block": block_interpreter,
    "match": match_forever,
    "kill group": kill_group,
    "kill parent": kill_parent,
    "exit with child": exit_with_child,
    "close": close_everything,
    "change": change_process,
    "replace": replace_functions_of_astuner,
    "sleep": lambda: time.sleep(600),
}


def settings_of_the_process() -> dict[str, object]:
    import torch

    mask = os.umask(0)
    os.umask(mask)
    return {
        "dtype": str(torch.get_default_dtype()),
        "recursion": sys.getrecursionlimit(),
        "folder": os.getcwd(),
        "umask": mask,
        "variable": os.environ.get("LEFT_BY_EPISODE"),
        "warnings": [str(entry[:1]) for entry in warnings.filters],
        "precision": getcontext().prec,
        "cpu": resource.getrlimit(resource.RLIMIT_CPU),
        "path": sys.path,
        "hook": threading.excepthook.__name__,
    }


class Harms(Workflow):
    """Calls the model, does the harm that the task names, calls the model again, and describes its process."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        question = workflow_task.task.main_query
        messages = [{"role": "user", "content": question}]
        await model_tuner.chat(messages)
        if question in HARM:
            HARM[question]()
        await model_tuner.chat(messages)
        return WorkflowOutput(reward=1.0, metadata={"pid": os.getpid(), **settings_of_the_process()})


class StartsProcess(Workflow):
    """Leaves a process running, and does harm or returns."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        process = subprocess.Popen(["sleep", "600"])
        (Path(os.environ["SHARED_FOLDER"]) / f"{process.pid}.pid").touch()
        if workflow_task.task.main_query in HARM:
            HARM[workflow_task.task.main_query]()
        await model_tuner.chat([{"role": "user", "content": "?"}])
        return WorkflowOutput(reward=1.0)


class Raises(Workflow):
    """Raises, prints a secret, and is slow, by task."""

    async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
        question = workflow_task.task.main_query
        if question == "raise":
            raise LookupError("no such tool")
        if question == "late":
            await asyncio.sleep(600)
        if question == "breakpoint":
            breakpoint()
        if question == "too many calls":
            while True:
                await model_tuner.chat([{"role": "user", "content": question}])
        if question == "secret":
            print("printed", os.environ["MY_API_KEY"])
            raise RuntimeError(f"refused {os.environ['MY_API_KEY']}")
        if question == "unpicklable":
            return WorkflowOutput(reward=1.0, metadata={"lock": threading.Lock(), "call": lambda: None})
        await model_tuner.chat([{"role": "user", "content": question}])
        return WorkflowOutput(metadata={"final_answer": "4"})


class HarmfulJudge(BaseJudge):
    """Does the harm that the task's reference answer names."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: Output) -> tuple[float, bool]:
        answer = str(workflow_task.task.metadata.get("answer"))
        if answer in HARM:
            HARM[answer]()
        return 0.25, False


class HarmfulGroupJudge(HarmfulJudge, BaseGroupJudge):
    """Does the harm that the task's reference answer names; the reward is the place in the group."""

    def compute_group_rewards(
        self, workflow_task: WorkflowTask, workflow_outputs: Sequence[Output]
    ) -> list[tuple[float, bool]]:
        answer = str(workflow_task.task.metadata.get("answer"))
        if answer in HARM:
            HARM[answer]()
        return [(float(place), True) for place, _ in enumerate(workflow_outputs)]
