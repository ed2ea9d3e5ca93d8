"""Worker processes: what harms a process fails one episode, and everything else is as in the main thread."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner import AstunerJob
from astuner.backbone.episode_workers import handle
from astuner.backbone.episode_workers.fork_server import SERVER_NAME
from astuner.backbone.episode_workers.rollout import make_rollout, with_episodes
from astuner.backbone.training.run_inputs import RunInputs
from astuner.errors import BackboneError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.schema import Episode, Task, TaskSet
from astuner.system.process_tree import is_running
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from tests.launcher.liveness import running_after
from tests.scripted_engine import ScriptedEngine

AGENTS = Path(__file__).with_name("isolation_agents.py")
SETTINGS = CallSettings(max_tokens=8, max_calls=5)
GOOD = ("good 0", "good 1", "good 2")
TIGHT: dict[str, Any] = {"rollout__episode_timeout": 1.0, "judge": "HarmfulJudge"}


def request(*questions: str, answers: tuple[str, ...] = ()) -> BatchRequest:
    known = dict(enumerate(answers))
    tasks = [Task(f"t{i}", question, metadata={"answer": known.get(i)}) for i, question in enumerate(questions)]
    return BatchRequest(tasks, 1, "train", 1, 0, SETTINGS)


@pytest.fixture(scope="module")
def rollout_of(model_folder: Path, tokenizer: Any) -> Iterator[Callable[..., TaskRollout]]:
    """Return a function that returns the rollout of a workflow of a file; a repeated call, the same one.

    Its workers are replaced after each harm.
    """
    before = set(psutil.Process().children(recursive=True))

    @cache
    def begin(workflow: str, *, file: Path = AGENTS, judge: str = "", **settings: Any) -> TaskRollout:
        job = AstunerJob(algorithm="grpo", model=model_folder, model__renderer="qwen3", **{
            "backbone": "local",
            "rollout__max_env_worker": 2,
            "rollout__episode_timeout": 30.0,
            "task_judge__timeout": 5.0,
        } | settings)  # fmt: skip
        job.set_workflow(f"{file}->{workflow}").set_data("file", "unused.jsonl")
        if judge:
            job.set_judge(f"{AGENTS}->{judge}")
        config = job.config.astuner
        codec = ChatCodec(tokenizer, "qwen3")
        inputs = RunInputs(TaskSet((), ()), str(model_folder), tokenizer, codec, (AGENTS.parent,))
        ids = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
        engine = ScriptedEngine(lambda prompt, params: ids, max_model_len=512)
        rollout = make_rollout(config, stack.enter_context(with_episodes(config, inputs)), engine, ActiveEpisodes())
        stack.callback(rollout.close)
        return rollout

    with contextlib.ExitStack() as stack:
        yield begin
    # A worker that was starting when its connection closed ends after its imports.
    assert not running_after(set(psutil.Process().children(recursive=True)) - before, 20)


def by_question(episodes: list[Episode]) -> dict[str, Episode]:
    return {episode.task.main_query: episode for episode in episodes}


@pytest.mark.parametrize(
    ("harm", "expected"),
    [
        ("exit", "exited with code 7"),
        ("exit in a thread", "exited with code 9"),
        ("interrupt", "signal 2 (SIGINT)"),
        ("abort", "signal 6 (SIGABRT)"),
        ("segfault", "signal 11 (SIGSEGV)"),
        ("memory", "signal 9 (SIGKILL; Linux sends it when memory runs out)"),
        ("kill group", "signal 9 (SIGKILL"),
        ("exit with child", "exited with code 3"),
        ("close", "closed its connection"),
        ("replace", "failed in astuner: TypeError: 'NoneType' object is not callable; it is replaced"),
    ],
)
def test_a_process_that_ends_fails_its_episode_only(rollout_of: Callable[..., TaskRollout], harm: str, expected: str):
    episodes = by_question(rollout_of("Harms").run(request(harm, *GOOD)))
    failed = episodes.pop(harm)
    assert (failed.status, failed.error_kind, failed.reward) == ("failed", "worker", None)
    assert failed.error is not None
    assert expected in failed.error
    assert "episode worker" in failed.error
    assert len(failed.calls) in (1, 2)
    assert {episode.status for episode in episodes.values()} == {"ok"}


def test_the_stack_of_a_crash_is_recorded(rollout_of: Callable[..., TaskRollout]):
    (failed,) = rollout_of("Harms").run(request("segfault"))
    assert failed.error is not None
    assert "isolation_agents.py" in failed.error
    assert "in segfault" in failed.error
    assert "Segmentation fault" in str(failed.error_traceback)


def test_a_blocked_interpreter_is_killed(rollout_of: Callable[..., TaskRollout], monkeypatch: pytest.MonkeyPatch):
    # One of them computes until it is killed.
    for name in ("pool._GRACE_SECONDS", "handle._ABANDON_SECONDS", "handle._REPORT_SECONDS"):
        monkeypatch.setattr(f"astuner.backbone.episode_workers.{name}", 1.0)
    rollout = rollout_of("Harms", rollout__episode_timeout=1.5, task_judge__timeout=0.5)
    episodes = by_question(rollout.run(request("block", "match", *GOOD)))
    for harm, function in (("block", "block_interpreter"), ("match", "match_forever")):
        failed = episodes.pop(harm)
        assert (failed.status, failed.error_kind) == ("failed", "timeout")
        assert failed.error is not None
        assert f"in {function}" in failed.error
        assert "killed and replaced" in failed.error
        assert len(failed.calls) == 1
    assert {episode.status for episode in episodes.values()} == {"ok"}


def test_settings_of_the_process_reach_no_other_worker(rollout_of: Callable[..., TaskRollout]):
    before = (os.getcwd(), os.environ.get("LEFT_BY_EPISODE"))
    rollout = rollout_of("Harms")
    (first,) = rollout.run(request("good"))
    changed = rollout.run(request("change", "change"))
    assert [episode.status for episode in changed] == ["ok", "ok"]
    after = rollout.run(request(*GOOD, *(f"more {i}" for i in range(5))))
    assert [episode.error for episode in after] == [None] * 8
    changed_pids = {episode.metadata["pid"] for episode in changed}
    for episode in after:
        assert episode.metadata["pid"] not in changed_pids
        assert episode.metadata == {**first.metadata, "pid": episode.metadata["pid"]}
    assert before == (os.getcwd(), os.environ.get("LEFT_BY_EPISODE"))


def test_the_process_that_starts_workers_is_replaced(rollout_of: Callable[..., TaskRollout]):
    rollout = rollout_of("Harms", rollout__max_retries=1)
    episodes = rollout.run(request("kill parent", *GOOD, "kill parent"))
    assert [episode.error for episode in episodes] == [None] * 5
    assert [episode.error for episode in rollout.run(request(*GOOD))] == [None] * 3


@pytest.mark.parametrize(("imports", "starts"), [(0, 1), (1, 6)])
def test_an_agent_that_ends_its_process_when_it_is_imported(
    rollout_of: Callable[..., TaskRollout], tmp_path: Path, imports: int, starts: int
):
    counted = f"open({str(tmp_path / 'starts')!r}, 'a+')"
    agent = tmp_path / "agent.py"
    agent.write_text(
        f"import os\nfrom astuner import Workflow\n{counted}.write('x')\nfile = {counted}\nfile.seek(0)\n"
        f"if len(file.read()) > {imports}: os._exit(3)\n"
        f"class Leaves(Workflow):\n    async def execute(self, workflow_task, model_tuner): os._exit(4)\n"
    )
    with pytest.raises(
        BackboneError,
        match=r"episode worker \d+ \(pid \d+\), which imported the agent, exited with "
        "code 3: its code must not end the process",
    ):
        rollout_of("Leaves", file=agent, rollout__max_retries=1).run(request("a"))
    assert len((tmp_path / "starts").read_text()) == starts


def test_an_agent_whose_import_hangs_is_named(
    rollout_of: Callable[..., TaskRollout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, log: list[str]
):
    agent = tmp_path / "agent.py"
    agent.write_text("import time\nclass Waits: pass\ntime.sleep(1e6)\n")
    monkeypatch.setattr(handle, "_SLOW_START_SECONDS", 2.0)
    monkeypatch.setattr(handle, "_START_SECONDS", 6.0)
    where = re.escape(f"it is at {agent}:3, in <module>")
    with pytest.raises(BackboneError, match=rf"episode worker 1 .* has not imported the agent within 6 s; {where}"):
        rollout_of("Waits", file=agent)
    assert any(re.search(rf"has been importing the agent for 2 s; {where}", line) for line in log)


def test_retries_run_after_a_crash(rollout_of: Callable[..., TaskRollout]):
    attempts = rollout_of("Harms", rollout__max_retries=1).run(request("exit"))
    assert [episode.episode_id for episode in attempts] == ["train-000001-t0-0", "train-000001-t0-0#2"]
    assert {episode.error_kind for episode in attempts} == {"worker"}


def test_workers_are_forked_from_a_process_without_other_threads(rollout_of: Callable[..., TaskRollout]):
    workers = [psutil.Process(each.metadata["pid"]) for each in rollout_of("Harms").run(request(*GOOD))]
    (server,) = {worker.parent() for worker in workers}
    assert server is not None
    assert server.name() == SERVER_NAME
    assert server != psutil.Process()
    assert server.num_threads() == 1
    assert len(list(filter(is_running, server.children()))) == 2


def test_workers_are_used_again(rollout_of: Callable[..., TaskRollout]):
    rollout = rollout_of("Harms")
    pids = {episode.metadata["pid"] for _ in range(3) for episode in rollout.run(request(*GOOD))}
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_a_judge_runs_in_the_process(rollout_of: Callable[..., TaskRollout]):
    rollout = rollout_of("Raises", **TIGHT)
    scored, crashed = rollout.run(request("a", "b", answers=("", "exit")))
    assert (scored.status, scored.reward, scored.is_success) == ("ok", 0.25, False)
    assert (crashed.status, crashed.error_kind) == ("failed", "worker")


def test_a_judge_of_groups_runs_in_a_process(rollout_of: Callable[..., TaskRollout]):
    rollout = rollout_of("Raises", judge="HarmfulGroupJudge")
    episodes = rollout.run(replace(request("a", "b", answers=("", "exit")), repeats=2))
    assert [(episode.status, episode.reward) for episode in episodes[:2]] == [("ok", 0.0), ("ok", 1.0)]
    assert all(episode.samples for episode in episodes[:2])
    for episode in episodes[2:]:
        assert (episode.status, episode.error_kind, episode.reward) == ("failed", "worker", None)
        assert "which judged these episodes, exited with code 7" in str(episode.error)
        assert len(episode.calls) == 1


def test_errors_and_limits_are_those_of_the_main_thread(rollout_of: Callable[..., TaskRollout]):
    questions = ("raise", "late", "too many calls", "good", "unpicklable", "breakpoint")
    in_processes = rollout_of("Raises", **TIGHT).run(request(*questions))
    inline = {"backbone": "debug", "debug__debug_max_parallel": 1}
    in_this_thread = rollout_of("Raises", **inline, **TIGHT).run(request(*questions[:-1]))

    def outcome(episode: Episode) -> tuple[Any, ...]:
        error = str(episode.error).partition(";")[0]
        calls = [replace(call, start_time=0.0, end_time=0.0) for call in episode.calls]
        return episode.status, episode.error_kind, error, episode.reward, episode.samples, calls

    assert [outcome(episode) for episode in in_processes[:-1]] == [outcome(episode) for episode in in_this_thread]
    assert "in execute" in str(in_processes[0].error_traceback)
    assert "breakpoint() needs the terminal" in str(in_processes[-1].error)
