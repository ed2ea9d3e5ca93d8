"""Programs as agents: their episodes, their environment and files, and the processes that they leave."""

from __future__ import annotations

import datetime
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from astuner.context_tracker.audit import certificate
from astuner.errors import ConfigError
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.targets import Targets
from astuner.schema import Task
from astuner.task_judge.judge_base import BaseJudge
from tests.workflows.command.programs import is_running, run_code, run_command, write_program


class SaysTwo(BaseJudge):
    def compute_reward(self, workflow_task: Any, workflow_output: Any) -> tuple[float, bool]:
        folder = Path(workflow_output.metadata["working_folder"])
        written = (folder / "note").read_text() if (folder / "note").exists() else ""
        return 0.5, "2" in workflow_output.metadata["final_answer"] + written


@pytest.fixture(autouse=True)
def _no_folder_remains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield
    assert not list(folder.glob("astuner-episode-*"))


def test_the_last_line_is_the_reward(tokenizer: Any, tmp_path: Path) -> None:
    code = 'print("answer:", call(json.loads(os.environ["TASK_JSON"])["main_query"])); print(0.25); print()'
    episode = run_code(tokenizer, tmp_path, code)
    assert (episode.status, episode.error, episode.reward, episode.is_success) == ("ok", None, 0.25, True)
    assert episode.calls[0].messages[0]["content"] == "What is 1 + 1?"
    assert certificate(episode.calls, episode.samples) == 1.0
    assert episode.metadata["stdout"] == "answer: 2\n0.25\n\n"
    assert (episode.metadata["stderr"], episode.metadata["exit_code"]) == ("", 0)


def test_the_last_line_says_whether_the_task_is_solved(tokenizer: Any, tmp_path: Path) -> None:
    code = 'call(); print(json.dumps({"reward": 0.12, "is_success": False}))'
    episode = run_code(tokenizer, tmp_path, code)
    assert (episode.status, episode.error, episode.reward, episode.is_success) == ("ok", None, 0.12, False)


def test_a_judge_takes_precedence_and_sees_the_working_folder(tokenizer: Any, tmp_path: Path) -> None:
    judge = SaysTwo.__new__(SaysTwo)
    episode = run_code(tokenizer, tmp_path, 'open("note", "w").write(call()); print("no number")', judge=judge)
    assert (episode.status, episode.reward, episode.is_success) == ("ok", 0.5, True), episode.error
    assert episode.metadata["final_answer"] == "no number"


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("call(); raise SystemExit('it broke')", "workflow", r"'.*python.*' exited with code 1; .*stderr:\nit broke$"),
        ("call(); os._exit(7)", "workflow", "exited with code 7; it printed nothing"),
        ("call(); print('why', flush=True); os._exit(7)", "workflow", r"code 7; the end of its stdout:\nwhy$"),
        ("call(); os.kill(os.getpid(), 9)", "workflow", "was ended by SIGKILL"),
        (
            "call(); print('{\"reward\": true}')",
            "workflow",
            "last line of the command's stdout is '{\"reward\": true}'",
        ),
        ("call(); print('done')", "workflow", "last line of the command's stdout is 'done'; expected the reward"),
        ("call(); print(float('nan'))", "workflow", "is 'nan'; expected the reward, a finite number"),
        ("call(); print('-inf')", "workflow", "is '-inf'; expected the reward"),
        ("call(); print('reward: 1')", "workflow", "is 'reward: 1'; expected the reward"),
        ("call()", "workflow", "is ''; expected the reward"),
        ("call(); os.write(1, bytes([255, 254]) + b'1')", "workflow", "is '\ufffd\ufffd1'; expected the reward"),
        ("print(1.0)", "workflow", "made no LLM call; expected calls to the address in OPENAI_BASE_URL"),
        ("call(); import time; time.sleep(600)", "timeout", "longer than rollout.episode_timeout"),
    ],
)
def test_episodes_that_fail(tokenizer: Any, tmp_path: Path, code: str, kind: str, message: str) -> None:
    timeout = 5 if kind == "timeout" else 60
    episode = run_code(
        tokenizer, tmp_path, f"import sys; print('x', file=sys.stderr) if 0 else 0\n{code}", timeout=timeout
    )
    assert (episode.status, episode.error_kind, episode.reward) == ("failed", kind, None)
    assert re.search(message, episode.error or "", re.DOTALL), episode.error
    assert len(episode.calls) == int("call()" in code)


def test_output_is_recorded_after_a_timeout(tokenizer: Any, tmp_path: Path) -> None:
    code = "call(); print('before', flush=True); import time; time.sleep(600)"
    episode = run_code(tokenizer, tmp_path, code, timeout=5)
    assert episode.error_kind == "timeout"
    assert episode.metadata["stdout"] == "before\n"


def test_a_gigabyte_of_output_is_cut(tokenizer: Any, tmp_path: Path) -> None:
    code = """
call()
print("start")
for _ in range(1024):
    os.write(1, b"x" * 2**20)
    os.write(2, bytes([255]) * 2**20)
print()
print(0.75)
"""
    episode = run_code(tokenizer, tmp_path, code, max_output_bytes=1000)
    assert (episode.reward, episode.error) == (0.75, None)
    stdout = episode.metadata["stdout"]
    assert stdout.startswith(("start\nxxx", "xxx"))
    assert stdout.endswith("\n0.75\n")
    assert re.search(r"\[10737\d+ bytes were cut\]", stdout)
    assert len(stdout) < 1100
    assert len(episode.metadata["stderr"]) < 1100


def test_a_daemon_that_holds_the_output_open_ends_with_the_episode(tokenizer: Any, tmp_path: Path) -> None:
    code = """
import subprocess, sys
call()
child = subprocess.Popen([sys.executable, "-c", "import time\\nwhile True: print('y' * 999, flush=True)"],
                         start_new_session=True)
print(child.pid, flush=True)
print(1, flush=True)
os._exit(0)
"""
    code = code.replace("while True: print('y' * 999, flush=True)", "time.sleep(600)")
    episode = run_code(tokenizer, tmp_path, code)
    assert (episode.reward, episode.error) == (1.0, None)
    pid = int(episode.metadata["stdout"].split()[0])
    assert not is_running(pid)
    assert any(f"pid {pid}" in text for text in episode.ended_processes)


def test_calls_of_children_count(tokenizer: Any, tmp_path: Path) -> None:
    write_program(tmp_path, "call('from a child')", "child.py")
    code = f"""
import subprocess, sys
children = [subprocess.Popen([sys.executable, {str(tmp_path / "child.py")!r}]) for _ in range(3)]
assert not any(child.wait() for child in children)
call("from the parent")
print(1)
"""
    episode = run_code(tokenizer, tmp_path, code)
    assert episode.error is None
    assert [call.messages[0]["content"] for call in episode.calls] == ["from a child"] * 3 + ["from the parent"]


def test_a_forked_child_counts(tokenizer: Any, tmp_path: Path) -> None:
    code = "if os.fork() == 0: call('child'); os._exit(0)\nos.wait(); call('parent'); print(1)"
    episode = run_code(tokenizer, tmp_path, code)
    assert [call.messages[0]["content"] for call in episode.calls] == ["child", "parent"]


def test_the_environment_has_no_secrets_of_the_user(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("MY_API_KEY", "HF_TOKEN", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, "a-value-that-is-secret")
    monkeypatch.setenv("DATABASE", "postgres://user:a-password-in-a-url@host/db")
    monkeypatch.setenv("HARMLESS", "kept")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.invalid:1")
    code = """
call()
home = os.environ["HOME"]
assert os.listdir(home) == [] and os.listdir(".") == [] and os.getcwd() == os.environ["PWD"]
print(json.dumps(dict(os.environ)))
print(1)
"""
    episode = run_code(
        tokenizer, tmp_path, code, pass_env=["HF_TOKEN"], env={"EXTRA": "{task_id}", "MODEL": "x/{model}", "N": 3}
    )
    assert episode.error is None
    text = episode.metadata["stdout"]
    environment = json.loads(text.splitlines()[0])
    assert {"MY_API_KEY", "ANTHROPIC_AUTH_TOKEN", "OPENAI_ORG_ID", "XDG_CONFIG_HOME", "DATABASE"}.isdisjoint(
        environment
    )
    assert environment["HARMLESS"] == "kept"
    assert (environment["EXTRA"], environment["MODEL"], environment["N"]) == ("t0", "x/astuner", "3")
    assert environment["OPENAI_BASE_URL"] == environment["ANTHROPIC_BASE_URL"] + "/v1"
    assert environment["HOME"] != os.environ["HOME"]
    assert environment["NO_PROXY"].endswith("127.0.0.1,localhost")
    # What the program printed is redacted in the record.
    assert environment["HF_TOKEN"] == environment["OPENAI_API_KEY"] == environment["ANTHROPIC_API_KEY"] == "[redacted]"
    assert "a-value-that-is-secret" not in text


@pytest.mark.parametrize("shift", range(0, 40, 3))
def test_no_part_of_a_secret_remains_where_output_is_cut(
    tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shift: int
) -> None:
    monkeypatch.setenv("MY_API_KEY", "QWERTYUIOPASDFGH")
    code = f"call(); key = os.environ['MY_API_KEY']; print('-' * {shift} + key * 200, '\\n' + key * 9 + '\\n1')"
    episode = run_code(tokenizer, tmp_path, code, pass_env=["MY_API_KEY"], max_output_bytes=200)
    assert episode.reward == 1.0
    assert not re.search("[A-Z]{2,}", re.sub(r"\[\d+ bytes were cut\]", "", episode.metadata["stdout"]))


def test_files_are_copied_for_each_episode(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/numbers.txt").write_text("7")
    for task in ("a", "b"):
        (tmp_path / f"repos/{task}").mkdir(parents=True)
        (tmp_path / f"repos/{task}/name").write_text(task)
    write_program(
        tmp_path,
        """
call()
assert open("data/numbers.txt").read() == "7"
open("data/numbers.txt", "w").write("8")
os.mkdir("read-only"); open("read-only/file", "w").close(); os.chmod("read-only", 0o500)
assert open("name").read() == json.loads(os.environ["TASK_JSON"])["metadata"]["repo"]
print(1)
""",
    )
    tasks = [Task(f"t{name}", "q", metadata={"repo": name}) for name in ("a", "b")]
    episodes = run_command(
        tokenizer,
        tmp_path,
        tasks=tasks,
        repeats=2,
        command=["./agent.py"],
        files=["data", "repos/{metadata.repo}/", "agent.py"],
    )
    assert [(episode.reward, episode.error) for episode in episodes] == [(1.0, None)] * 4
    assert (tmp_path / "data/numbers.txt").read_text() == "7"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"files": ["repos/{metadata.nme}"]}, "no visible metadata 'nme'; it has: answer"),
        ({"env": {"A": "{metadata.answer}"}, "visible_metadata": []}, "no visible metadata 'answer'; it has: none"),
        ({"files": ["{task_id}"]}, "workflow.files names 't0', but there is no such file or folder in"),
        ({"command": ["python", "agent.py", "{main_query}" * 30000]}, "cannot be started: .*Argument list too long"),
    ],
)
def test_missing_metadata_of_the_task_is_an_error(tokenizer: Any, tmp_path: Path, section: Any, message: str) -> None:
    episode = run_code(tokenizer, tmp_path, "call(); print(1)", **section)
    assert re.search(message, episode.error or ""), episode.error
    assert not episode.calls


def test_a_task_with_a_nul_character_or_of_any_length(tokenizer: Any, tmp_path: Path) -> None:
    code = """
import sys
assert "TASK_JSON" not in os.environ
task = json.load(open(os.environ["TASK_FILE"]))
call(); print(len(task["metadata"]["text"]))
"""
    tasks = [Task("t0", "nul \0", metadata={"text": "x" * 200_000})]
    assert run_code(tokenizer, tmp_path, code, tasks=tasks).reward == 200_000
    episode = run_code(tokenizer, tmp_path, code, tasks=tasks, command=["python", "agent.py", "{main_query}"])
    assert "cannot be started: embedded null byte" in (episode.error or "")


def test_metadata_that_json_lacks_is_passed_as_text(tokenizer: Any, tmp_path: Path) -> None:
    code = """
task = json.loads(os.environ["TASK_JSON"])
assert task["metadata"] == {"day": "2026-11-22", "ratio": "NaN", "nested": {"days": ["2026-11-22"]}}
assert json.loads(os.environ["NESTED"]) == task["metadata"]["nested"]
call(); print(1)
"""
    day = datetime.date(2026, 11, 22)
    tasks = [Task("t0", "q", metadata={"day": day, "ratio": math.nan, "nested": {"days": [day]}})]
    episode = run_code(tokenizer, tmp_path, code, tasks=tasks, env={"NESTED": "{metadata.nested}"})
    assert episode.status == "ok", episode.error


def test_hidden_metadata_is_not_passed(tokenizer: Any, tmp_path: Path) -> None:
    code = "call(); print(os.environ['TASK_JSON'], open(os.environ['TASK_FILE']).read()); print(1)"
    episode = run_code(tokenizer, tmp_path, code, visible_metadata=[])
    assert episode.reward == 1.0
    assert "answer" not in episode.metadata["stdout"]
    assert episode.task.metadata == {"answer": "2"}


def test_agents_are_named_by_their_system_prompt(tokenizer: Any, tmp_path: Path) -> None:
    code = """
for system in ("You are a coder.\\nToday is day 1.", "You are a coder.\\nToday is day 2.", "You review code.", None):
    call("go", system)
call("Please summarise this conversation", "You are a coder.")
call("go", "You write titles.")
print(1)
"""
    agents = {"summary": "summarise this conversation", "title": "You write titles"}
    episode = run_code(tokenizer, tmp_path, code, agents=agents)
    assert episode.error is None
    names = [call.agent_name for call in episode.calls]
    assert names[0] == names[1] != names[2]
    assert all(re.fullmatch(r"agent-[0-9a-f]{8}", name) for name in names[:3])
    assert names[3:] == ["agent", "summary", "title"]
    assert [call.target_tag for call in episode.calls] == ["default"] * 4 + ["summary", "title"]


def test_only_named_agents_are_left_out_of_training(tokenizer: Any, tmp_path: Path) -> None:
    from astuner.model_tuner.targets import FrozenModel

    agents = {"title": "You write titles"}
    targets = Targets(("default",), {"title": FrozenModel()}, agents)
    code = "call('x', 'You write titles.'); call('x', 'You code.'); print(1)"
    episode = run_code(tokenizer, tmp_path, code, agents=agents, targets=targets)
    assert [call.trained for call in episode.calls] == [False, True]
    assert [span.call_id for sample in episode.samples for span in sample.spans] == [episode.calls[1].call_id]


def test_too_many_calls_cut_the_episode(tokenizer: Any, tmp_path: Path) -> None:
    judge = SaysTwo.__new__(SaysTwo)
    lengths = CallSettings(max_model_len=4096, max_calls=2)
    episode = run_code(tokenizer, tmp_path, "while True: call()", judge=judge, settings=lengths)
    assert (episode.status, episode.error_kind, episode.reward) == ("ok", "max_steps", 0.5), episode.error
    assert len(episode.calls) == 2


def test_a_program_that_repeats_rejected_calls_is_ended(tokenizer: Any, tmp_path: Path) -> None:
    judge = SaysTwo.__new__(SaysTwo)
    code = """
while True:
    try: call()
    except Exception: pass
"""
    settings = CallSettings(max_model_len=4096, max_calls=2)
    episode = run_code(tokenizer, tmp_path, code, judge=judge, settings=settings, timeout=300)
    assert (episode.status, episode.error_kind, episode.reward) == ("ok", "max_steps", 0.5), episode.error


@pytest.mark.parametrize("raises", [True, False])
def test_degenerate_output_ends_the_episode(tokenizer: Any, tmp_path: Path, raises: bool) -> None:
    code = "call(); print(1)" if raises else "try: call()\nexcept Exception: pass\nprint(1)"
    settings = CallSettings(max_model_len=8192, max_tokens=2000, madness_checklist=("nonsense",))
    episode = run_code(tokenizer, tmp_path, code, settings=settings, answer=lambda prompt: "la " * 500)
    assert (episode.status, episode.reward) == ("ok", -1.0), episode.error
    assert episode.anomaly is not None


def test_a_rejected_call_is_the_error_of_a_program_that_prints_it(tokenizer: Any, tmp_path: Path) -> None:
    code = """
import urllib.error
try: call("word " * 500)
except urllib.error.HTTPError as error: raise SystemExit(json.load(error)["error"]["message"])
"""
    episode = run_code(tokenizer, tmp_path, code, settings=CallSettings(max_model_len=100))
    assert (episode.status, episode.error_kind) == ("failed", "context_length"), episode.error
    assert episode.metadata["exit_code"] == 1


def test_the_command_may_be_any_program(tokenizer: Any, tmp_path: Path) -> None:
    script = """#!/bin/sh
test "$1" = "What is 1 + 1?" && test "$2" = "agent.sh" || exit 3
exec python "$3"
"""
    (tmp_path / "agent.sh").write_text(script)
    (tmp_path / "agent.sh").chmod(0o755)
    write_program(tmp_path, "call(); print(1)")
    for command in (["./agent.sh"], ["agent.sh"], [str(tmp_path / "agent.sh")]):
        # A word without a slash or a suffix that names a file of the project remains a word.
        words = ["{main_query}", "agent.sh", str(tmp_path / "agent.py")]
        (episode,) = run_command(tokenizer, tmp_path, command=[*command, *words], files=["agent.sh"])
        assert (episode.reward, episode.error) == (1.0, None)


def test_a_script_without_an_interpreter(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "agent").write_text("echo 1")
    (tmp_path / "agent").chmod(0o755)
    (episode,) = run_command(tokenizer, tmp_path, command=["./agent"])
    assert "cannot be started: [Errno 8] Exec format error" in (episode.error or "")
    assert "#!/bin/sh" in (episode.error or "")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"command": ["no-such-program", "x"]}, "no program 'no-such-program' in a folder of PATH, in .*; install it"),
        ({"command": ["python agent.py"]}, "no program 'python agent.py' .*; write each word as an item of the list"),
        ({"command": ["./missing.sh"]}, "there is no program './missing.sh' in "),
        ({"command": ["./text.txt"]}, r"text.txt' is not executable; run `chmod \+x .*`, or start the list with"),
        ({"command": ["text.txt"]}, "text.txt' is not executable"),
        ({"command": ["./folder"]}, "folder' is not a file; expected a program"),
        ({"command": ["/"]}, "'/' is not a file"),
        ({"command": ["python"], "files": ["nothing"]}, "workflow.files names 'nothing', but there is no such file"),
        ({"command": ["python"], "pass_env": ["NOT_SET"]}, "names the environment variable NOT_SET, which is not set"),
    ],
)
def test_commands_that_cannot_run_are_errors_before_the_run(
    tokenizer: Any, tmp_path: Path, section: Any, message: str
) -> None:
    (tmp_path / "text.txt").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=message):
        run_command(tokenizer, tmp_path, **section)
