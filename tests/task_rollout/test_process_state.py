"""Changes that an episode makes to the process are detected, reported with the episode, and restored."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
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
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from astuner import ModelTuner, Workflow, WorkflowOutput, WorkflowTask
from astuner.llm_engine.scripted import ScriptedEngine
from astuner.model_tuner import CallSettings, ChatCodec
from astuner.schema import Episode, Task
from astuner.task_rollout import BatchRequest, TaskRollout
from astuner.task_rollout.process_state import ProcessState
from astuner.task_runner import TaskRunner


def run(
    tokenizer: Any, in_main_thread: bool, bodies: dict[str, Callable[[], Any]], workers: int = 1
) -> dict[str, Episode]:
    class Changes(Workflow):
        async def execute(self, workflow_task: WorkflowTask, model_tuner: ModelTuner) -> WorkflowOutput:
            bodies[workflow_task.task_id]()
            await model_tuner.chat([{"role": "user", "content": "hi"}])
            return WorkflowOutput(reward=1.0)

    ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=4096)
    runner = TaskRunner(Changes, None, engine, ChatCodec(tokenizer, "qwen3"), 30.0)
    rollout = TaskRollout(runner, workers=workers, in_main_thread=in_main_thread)
    episodes = rollout.run(BatchRequest([Task(name, "q") for name in bodies], 1, "train", 1, 1, CallSettings()))
    rollout.close()
    return {episode.task.task_id: episode for episode in episodes}


def nothing() -> None:
    pass


def variables() -> dict[str, str]:
    """Without the mark of the process's episodes, which the first of them adds."""
    return {name: value for name, value in os.environ.items() if name != "ASTUNER_EPISODE"}


def mask_of_new_files() -> int:
    os.umask(mask := os.umask(0o077))
    return mask


def set_time_zone() -> None:
    os.environ["TZ"] = "XYZ-9"
    time.tzset()


def wrap(owner: Any, name: str) -> None:
    """Replace a function by one that does the same, because other threads of the process call it meanwhile."""
    function = getattr(owner, name)

    def same(*arguments: Any, **options: Any) -> Any:
        return function(*arguments, **options)

    setattr(owner, name, same)


def stack_size() -> int:
    """Reading the size sets it to 0."""
    size = threading.stack_size()
    threading.stack_size(size)
    return size


CHANGES: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "the recursion limit": (lambda: sys.setrecursionlimit(400), sys.getrecursionlimit),
    "the switch interval": (lambda: sys.setswitchinterval(1.0), sys.getswitchinterval),
    "the working directory": (lambda: os.chdir("/"), os.getcwd),
    "the environment: NEW_VARIABLE": (lambda: os.environ.update(NEW_VARIABLE="1"), variables),
    "the environment: PATH": (lambda: os.environ.pop("PATH"), variables),
    "the garbage collector": (gc.disable, gc.isenabled),
    "the socket timeout": (lambda: socket.setdefaulttimeout(1e-6), socket.getdefaulttimeout),
    "logging.disable": (lambda: logging.disable(logging.CRITICAL), lambda: logging.root.manager.disable),
    "module json: dumps": (lambda: wrap(json, "dumps"), lambda: json.dumps),
    "module time: monotonic": (lambda: wrap(time, "monotonic"), lambda: time.monotonic),
    "module random: choice": (lambda: delattr(random, "choice"), lambda: random.choice),
    "the mask of new files": (lambda: os.umask(0o177), mask_of_new_files),
    "the environment: TZ": (set_time_zone, lambda: time.strftime("%Z", time.localtime(0))),
    "the resource limits: RLIMIT_FSIZE": (
        lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.getrlimit(resource.RLIMIT_FSIZE)[1])),
        lambda: resource.getrlimit(resource.RLIMIT_FSIZE),
    ),
    "sys.path": (sys.path.clear, lambda: list(sys.path)),
    "sys.meta_path": (sys.meta_path.clear, lambda: list(sys.meta_path)),
    "sys.stdout: 'StringIO' instead of": (lambda: setattr(sys, "stdout", io.StringIO()), lambda: sys.stdout),
    "module io: open": (lambda: wrap(io, "open"), lambda: io.open),
    "a timer": (lambda: signal.setitimer(signal.ITIMER_VIRTUAL, 600), lambda: signal.getitimer(signal.ITIMER_VIRTUAL)),
    "the filters of warnings: ": (
        lambda: warnings.simplefilter("error", ResourceWarning),
        lambda: list(warnings.filters),
    ),
    "the filters of warnings": (warnings.resetwarnings, lambda: list(warnings.filters)),
    "imported modules: torch": (
        lambda: sys.modules.update(torch=None),  # type: ignore[call-overload]
        lambda: sys.modules["torch"],
    ),
    "imported modules: json": (lambda: sys.modules.pop("json"), lambda: sys.modules.get("json")),
    "the handlers of logging": (logging.root.handlers.clear, lambda: list(logging.root.handlers)),
    "the level of logging": (lambda: logging.root.setLevel(1), lambda: logging.root.level),
    "module builtins: print": (lambda: wrap(builtins, "print"), lambda: builtins.print),
    "module builtins: __import__": (lambda: wrap(builtins, "__import__"), lambda: builtins.__import__),
    "class pathlib.Path: open": (lambda: wrap(Path, "open"), lambda: Path.open),
    "module socket: socket": (
        lambda: setattr(socket, "socket", type("socket", (socket.socket,), {})),
        lambda: socket.socket,
    ),
    "module sys: excepthook": (lambda: setattr(sys, "excepthook", None), lambda: sys.excepthook),
    "module threading: excepthook": (lambda: setattr(threading, "excepthook", None), lambda: None),
    "the trace function of threads": (lambda: threading.settrace(lambda *_: None), threading.gettrace),
    "the profile function of threads": (lambda: threading.setprofile(lambda *_: None), threading.getprofile),
    "the trace function": (lambda: sys.settrace(lambda *_: None), sys.gettrace),
    "the profile function": (lambda: sys.setprofile(lambda *_: None), sys.getprofile),
    "the blocked signals": (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2}),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    ),
    "the processors of the thread": (
        lambda: os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}),
        lambda: os.sched_getaffinity(0),
    ),
    "the stack size of threads": (lambda: threading.stack_size(2**30), stack_size),
    "the limit of digits": (lambda: sys.set_int_max_str_digits(640), sys.get_int_max_str_digits),
    "the garbage collector: ": (lambda: gc.set_threshold(1), gc.get_threshold),
    "asyncio's event loop policy": (
        lambda: asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy()),
        asyncio.get_event_loop_policy,
    ),
    "multiprocessing's start method": (
        lambda: multiprocessing.set_start_method("spawn", force=True),
        lambda: multiprocessing.get_start_method(allow_none=True),
    ),
    "torch's gradient mode": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "torch's default device": (lambda: torch.set_default_device("meta"), lambda: torch.empty(0).device),
    "torch's number of threads": (lambda: torch.set_num_threads(3), torch.get_num_threads),
    "torch's anomaly detection": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "torch's precision of float32 products": (
        lambda: torch.set_float32_matmul_precision("medium"),
        torch.get_float32_matmul_precision,
    ),
    "torch.backends.cudnn.deterministic": (
        lambda: setattr(torch.backends.cudnn, "deterministic", True),
        lambda: torch.backends.cudnn.deterministic,
    ),
    "torch's default dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
}


@pytest.mark.parametrize("in_main_thread", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_change_is_reported_with_its_episode_and_restored(
    tokenizer: Any, name: str, in_main_thread: bool, log: list[str]
) -> None:
    change, read = CHANGES[name]
    before = read()
    seen: list[Any] = []
    bodies = {"sound": nothing, "changes": change, "next": lambda: seen.append(read())}
    episodes = run(tokenizer, in_main_thread, bodies)
    assert read() == before
    assert seen == [before]
    assert [episode.process_effects for episode in episodes.values() if episode.task.task_id != "changes"] == [(), ()]
    (effect,) = episodes["changes"].process_effects
    assert effect.startswith(name)
    (text,) = [line for line in log if "changed settings of the process" in line]
    assert "episode train-000001-changes-0 changed settings of the process" in text
    assert effect in text


def test_signal_handler_in_the_main_thread_is_restored(tokenizer: Any) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    change = {"changes": lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN)}
    assert run(tokenizer, True, change)["changes"].process_effects == (f"signal handlers: {int(signal.SIGUSR1)}",)
    assert signal.getsignal(signal.SIGUSR1) == before


@pytest.mark.parametrize("in_main_thread", [True, False])
def test_an_alarm_without_a_handler_is_reported_and_does_not_end_the_process(
    tokenizer: Any, in_main_thread: bool
) -> None:
    before = signal.getsignal(signal.SIGVTALRM)

    def waits_for_its_alarm() -> None:
        assert callable(signal.getsignal(signal.SIGVTALRM))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
        while signal.getitimer(signal.ITIMER_VIRTUAL)[0]:
            sum(range(1000))
        time.sleep(0 if in_main_thread else 1)  # Python calls handlers when the main thread wakes

    episodes = run(tokenizer, in_main_thread, {"sound": nothing, "changes": waits_for_its_alarm, "next": nothing})
    effects = [episode.process_effects for episode in episodes.values()]
    assert effects == [(), ("SIGVTALRM: a timer without a handler expired",), ()]
    assert signal.getsignal(signal.SIGVTALRM) == before


def test_ordinary_changes_are_not_reported(tokenizer: Any) -> None:
    def ordinary() -> None:
        multiprocessing.get_context()
        warnings.filterwarnings("ignore", "a text that no warning has")
        logging.root.addHandler(logging.NullHandler())
        sys.modules["a_module_that_no_other_code_has"] = sys
        with warnings.catch_warnings():
            warnings.simplefilter("error")

    assert run(tokenizer, False, {"sound": ordinary})["sound"].process_effects == ()


def test_closed_streams_are_opened_again() -> None:
    """Runs in a separate process, because it closes the standard streams."""
    code = """
import asyncio, os, sys
from astuner.task_rollout.pool import EpisodePool, InlinePool

async def closes():
    sys.stdout.close()
    os.close(2)

async def sound():
    print("from the next episode")

for pool in (EpisodePool(1, 60.0), InlinePool()):
    results = dict(pool.run([closes, sound]))
    print(results[0].effects, results[1].effects)
    print("still here", file=sys.stderr, flush=True)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    effects = "('sys.stdout: closed', 'file descriptor 2: closed') ()"
    assert done.stdout == f"from the next episode\n{effects}\n" * 2, done
    assert done.stderr == "still here\n" * 2


def test_temporary_change_of_a_concurrent_episode_is_left_alone(tokenizer: Any, tmp_path: Path) -> None:
    entered, other_ended = threading.Event(), threading.Event()
    seen: list[str] = []

    def changes_for_a_while() -> None:
        with contextlib.chdir(tmp_path), contextlib.redirect_stdout(io.StringIO()) as output:
            entered.set()
            assert other_ended.wait(20)
            print("captured")
            seen.extend([os.getcwd(), output.getvalue()])

    bodies = {"changes": changes_for_a_while, "first": lambda: entered.wait(20), "second": other_ended.set}
    episodes = run(tokenizer, False, bodies, workers=2)
    assert seen == [str(tmp_path), "captured\n"]
    assert {episode.process_effects for episode in episodes.values()} == {()}


def test_change_of_one_of_several_concurrent_episodes(tokenizer: Any) -> None:
    before = dict(os.environ)
    both = threading.Barrier(2)

    def changes() -> None:
        both.wait(20)
        os.environ["NEW_VARIABLE"] = "1"

    episodes = run(tokenizer, False, {"changes": changes, "other": lambda: both.wait(20)}, workers=2)
    assert dict(os.environ) == before
    effects = [effect for episode in episodes.values() for effect in episode.process_effects]
    assert len(effects) == 1
    assert effects[0].startswith("the environment: NEW_VARIABLE")


def test_long_names_and_ids_are_shortened_in_the_report(tokenizer: Any, log: list[str]) -> None:
    name = "changes" + "x" * 100_000
    episodes = run(tokenizer, False, {name: lambda: os.environ.update({"X" * 100_000: "1"})})
    (effect,) = episodes[name].process_effects
    assert effect.startswith("the environment: X")
    (text,) = [line for line in log if "changed settings of the process" in line]
    assert len(text) < 2_000


def test_reading_the_settings_does_not_change_them() -> None:
    threading.stack_size(2**20)
    try:
        with contextlib.closing(ProcessState()) as state:
            state.check()
            assert stack_size() == 2**20
    finally:
        threading.stack_size(0)
