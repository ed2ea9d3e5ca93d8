"""Changes that an episode makes to its process are detected and reported with it."""

from __future__ import annotations

import asyncio
import builtins
import gc
import io
import json
import logging
import multiprocessing
import os
import random
import resource
import signal
import socket
import sys
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loguru import logger

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Task
from astuner.task_rollout.episodes_here import EpisodesHere
from astuner.task_rollout.process_settings import ProcessSettings
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.task_runner.runner import TaskRunner
from tests.scripted_engine import ScriptedEngine


def run(tokenizer: Any, bodies: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    """Run an episode for each body in a fork of this process; return the changes that each reports, and the log."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            result = json.dumps(_run_here(tokenizer, bodies)).encode()
        except BaseException as error:
            result = json.dumps({"log": [repr(error)]}).encode()
        finally:
            os.write(write_end, result)
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as file:
        reported: dict[str, Any] = json.loads(file.read())
    os.waitpid(pid, 0)
    return reported


def _run_here(tokenizer: Any, bodies: dict[str, Callable[[], Any]]) -> dict[str, Any]:
    class Changes(Workflow):
        async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            await model_tuner.chat([{"role": "user", "content": "hi"}])
            bodies[workflow_task.task_id]()
            return WorkflowOutput(reward=1.0)

    log: list[str] = []
    logger.remove()
    logger.add(lambda message: log.append(message.record["message"]), level="WARNING")
    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    rollout = TaskRollout(EpisodesHere(TaskRunner(Changes, None, engine, ChatCodec(tokenizer, "qwen3"), 30.0)))
    request = BatchRequest([], 1, "train", 1, 1, CallSettings())
    dumps = json.dumps
    episodes = [rollout.run(replace(request, tasks=[Task(name, "q")]))[0] for name in bodies]
    json.dumps = dumps
    sys.set_int_max_str_digits(0)
    return {"log": log} | {episode.task.task_id: list(episode.process_effects) for episode in episodes}


def nothing() -> None:
    pass


def set_time_zone() -> None:
    os.environ["TZ"] = "XYZ-9"
    time.tzset()


def wrap(owner: Any, name: str) -> None:
    """Replace a function by one that does the same, because other threads of the process call it meanwhile."""
    function = getattr(owner, name)

    def same(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    setattr(owner, name, same)


CHANGES: dict[str, Callable[[], Any]] = {
    "the recursion limit": lambda: sys.setrecursionlimit(400),
    "the switch interval": lambda: sys.setswitchinterval(1.0),
    "the working directory": lambda: os.chdir("/"),
    "the environment: NEW_VARIABLE": lambda: os.environ.update(NEW_VARIABLE="1"),
    "the environment: PATH": lambda: os.environ.pop("PATH"),
    "the garbage collector": gc.disable,
    "the socket timeout": lambda: socket.setdefaulttimeout(1e-6),
    "logging.disable": lambda: logging.disable(logging.CRITICAL),
    "module json: dumps": lambda: wrap(json, "dumps"),
    "module time: monotonic": lambda: wrap(time, "monotonic"),
    "module random: choice": lambda: delattr(random, "choice"),
    "the mask of new files": lambda: os.umask(0o177),
    "the environment: TZ": set_time_zone,
    "the resource limits: RLIMIT_NOFILE": lambda: resource.setrlimit(
        resource.RLIMIT_NOFILE, (200, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    ),
    "sys.path": sys.path.clear,
    "sys.meta_path": sys.meta_path.clear,
    "sys.stdout: 'StringIO' instead of": lambda: setattr(sys, "stdout", io.StringIO()),
    "module io: open": lambda: wrap(io, "open"),
    "a timer": lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 600),
    "the filters of warnings: ": lambda: warnings.simplefilter("error", ResourceWarning),
    "the filters of warnings": warnings.resetwarnings,
    "imported modules: torch": lambda: sys.modules.update(torch=None),
    "imported modules: json": lambda: sys.modules.pop("json"),
    "the handlers of logging": logging.root.handlers.clear,
    "the level of logging": lambda: logging.root.setLevel(1),
    "module builtins: print": lambda: wrap(builtins, "print"),
    "module builtins: __import__": lambda: wrap(builtins, "__import__"),
    "class pathlib.Path: open": lambda: wrap(Path, "open"),
    "module socket: socket": lambda: setattr(socket, "socket", type("socket", (socket.socket,), {})),
    "module sys: excepthook": lambda: setattr(sys, "excepthook", None),
    "the trace function of threads": lambda: threading.settrace(lambda *_: None),
    "the profile function of threads": lambda: threading.setprofile(lambda *_: None),
    "the trace function": lambda: sys.settrace(lambda *_: None),
    "the profile function": lambda: sys.setprofile(lambda *_: None),
    "the blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
    "the processors of the thread": lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
    "the stack size of threads": lambda: threading.stack_size(2**30),
    "the limit of digits": lambda: sys.set_int_max_str_digits(640),
    "the garbage collector: ": lambda: gc.set_threshold(1),
    "asyncio's event loop policy": lambda: asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy()),
    "multiprocessing's start method": lambda: multiprocessing.set_start_method("spawn", force=True),
    "torch's gradient mode": lambda: torch.set_grad_enabled(False),
    "torch's default device": lambda: torch.set_default_device("meta"),
    "torch's number of threads": lambda: torch.set_num_threads(3),
    "torch's anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "torch's precision of float32 products": lambda: torch.set_float32_matmul_precision("medium"),
    "torch.backends.cudnn.deterministic": lambda: setattr(torch.backends.cudnn, "deterministic", True),
    "torch's default dtype": lambda: torch.set_default_dtype(torch.float64),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_reported_with_its_episode(tokenizer: Any, name: str) -> None:
    reported = run(tokenizer, {"sound": nothing, "changes": CHANGES[name]})
    assert reported.get("sound") == [], reported
    (effect,) = reported["changes"]
    assert effect.startswith(name)
    (text,) = [line for line in reported["log"] if "changed settings of its process" in line]
    assert text == f"episode train-000001-changes-0 changed settings of its process: {effect}"


def test_a_later_episode_is_compared_with_what_it_found(tokenizer: Any) -> None:
    first = {"changes": lambda: os.environ.update(NEW_VARIABLE="1"), "next": nothing}
    reported = run(tokenizer, first)
    assert reported["changes"] == ["the environment: NEW_VARIABLE"]
    assert reported["next"] == []


def test_ordinary_changes_are_not_reported(tokenizer: Any) -> None:
    def ordinary() -> None:
        multiprocessing.get_context()
        warnings.filterwarnings("ignore", "a text that no warning has")
        logging.root.addHandler(logging.NullHandler())
        sys.modules["a_module_that_no_other_code_has"] = sys
        with warnings.catch_warnings():
            warnings.simplefilter("error")

    assert run(tokenizer, {"sound": ordinary})["sound"] == []


def test_modules_that_a_fork_server_has_imported_are_checked_at_the_top_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_shared_modules", "_shared_count"):
        monkeypatch.setattr(ProcessSettings, name, getattr(ProcessSettings, name))
    ProcessSettings.share_modules()
    monkeypatch.setitem(sys.modules, "imported.later", sys)
    settings = ProcessSettings()
    settings.read()
    changes = (
        ("json", ["imported modules: json"]),
        ("json.decoder", []),
        ("imported.later", ["imported modules: imported.later"]),
    )
    for name, expected in changes:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, name, os)
            assert list(settings.changes()) == expected


def test_closed_streams_are_reported(tokenizer: Any) -> None:
    def closes() -> None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 that of pytest has another descriptor
        sys.stdout.close()
        os.close(2)

    assert [effect.partition(":")[0] for effect in run(tokenizer, {"closes": closes})["closes"]] == [
        "sys.stdout",
        "file descriptor 2",
    ]


def test_long_names_and_ids_are_shortened_in_the_report(tokenizer: Any) -> None:
    name = "changes" + "x" * 100_000
    reported = run(tokenizer, {name: lambda: os.environ.update({"X" * 100_000: "1"})})
    (effect,) = reported[name]
    assert effect.startswith("the environment: X")
    (text,) = [line for line in reported["log"] if "changed settings of its process" in line]
    assert len(text) < 2_000


def test_reading_the_settings_does_not_change_them() -> None:
    threading.stack_size(2**20)
    try:
        settings = ProcessSettings()
        settings.read()
        assert settings.changes() == ()
        size = threading.stack_size()
        assert size == 2**20
    finally:
        threading.stack_size(0)
