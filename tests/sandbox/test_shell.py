"""Shell commands in a sandbox: files persist, processes do not, and nothing of the host can be changed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from astuner.sandbox import SandboxLimits, ShellSandbox, run_program, run_python_program
from tests.sandbox.namespaces import needs_namespaces


@pytest.fixture
def shell() -> Iterator[ShellSandbox]:
    sandbox = ShellSandbox(["/app"], "/app/work", env={"NAME": "Ada"})
    yield sandbox
    folder = sandbox.host_path("/app").parent
    assert folder.is_dir()
    sandbox.close()
    assert not folder.exists()


async def output(shell: ShellSandbox, command: str, timeout: float = 60) -> str:
    result = await shell.run(command, timeout)
    return result.stdout + result.stderr


@needs_namespaces
async def test_files_persist_and_variables_do_not(shell: ShellSandbox) -> None:
    assert (
        await output(shell, "pwd; echo $NAME $HOME; X=1; echo a > note; cd /tmp; touch ~/b t")
        == "/app/work\nAda /root\n"
    )
    # The home and /tmp also show the folder of this Python, where that is below one of them.
    assert await output(shell, "echo $X; pwd; cat note; ls ~/b /tmp/t") == "\n/app/work\na\n/root/b\n/tmp/t\n"
    assert shell.host_path("/app/work/note").read_text() == "a\n"
    result = await shell.run("exit 3", 60)
    assert (result.returncode, result.ended_by) == (3, None)


@needs_namespaces
async def test_usual_tools_work(shell: ShellSandbox) -> None:
    assert await output(shell, "id -u; cat /proc/$$/comm; cat <(echo a); echo b > /dev/null") == "0\nbash\na\n"
    assert await output(shell, "mkdir d; echo 1 > d/x; tar cf d.tar d && rm -r d && tar xf d.tar && cat d/x") == "1\n"
    assert await output(shell, "python -c 'import numpy; print(numpy.eye(2).sum())'") == "2.0\n"
    assert (
        await output(shell, "printf '#!/bin/bash\\necho run' > run; chmod +x run; ./run; mv run /tmp; ls")
        == "run\nd\nd.tar\n"
    )


@needs_namespaces
async def test_commands_need_no_standard_library(shell: ShellSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("prefix", "base_prefix", "exec_prefix"):  # "//" is a prefix that Python may have
        monkeypatch.setattr(sys, name, "//usr/share")
    assert await output(shell, "echo a") == "a\n"


@needs_namespaces
async def test_a_readable_file_does_not_change_the_folder_that_it_is_mounted_in(tmp_path: Path) -> None:
    shell = ShellSandbox(["/etc"], "/tmp")
    (tmp_path / "target").write_text("the host's")
    (shell.host_path("/etc") / "passwd").write_text("own")
    (shell.host_path("/etc") / "group").symlink_to(tmp_path / "target")
    await shell.run("true", 60)
    assert (shell.host_path("/etc") / "passwd").read_text() == "own"
    assert (tmp_path / "target").read_text() == "the host's"
    shell.close()


class Text(str):
    """A text of another type, such as `numpy.str_`."""


async def test_texts_may_have_any_type_of_string() -> None:
    result = await run_python_program(
        Text("print(open('data').read())"), 60, files={Text("data"): Text("\ud83d\ude00")}
    )
    assert (result.stdout, result.stderr) == ("\N{GRINNING FACE}\n", "")


@needs_namespaces
async def test_the_host_is_not_visible(shell: ShellSandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("my key")
    pid = os.getpid()
    text = await output(shell, f"cat {tmp_path}/secret; ls {tmp_path}; kill -9 {pid}; cat /proc/{pid}/environ")
    assert "my key" not in text
    assert text.count("No such file") == 3
    text = await output(shell, "touch /usr/bin/x /x /etc/x; rm -rf /usr/bin/env; ls /usr/bin/env")
    assert text.startswith("/usr/bin/env\n")
    assert "my key" not in await output(
        shell, f"ln -s {tmp_path}/secret link; cat link; python -c 'import socket; socket.socket()'"
    )
    assert "PermissionError" in await output(shell, "python -c 'import socket; socket.socket()'")
    assert await output(shell, "env | grep -c ASTUNER") == "0\n"


@needs_namespaces
async def test_processes_end_with_their_command(shell: ShellSandbox) -> None:
    seconds = f"617.{os.getpid()}"  # the processes of other tests do not have it
    await shell.run(f"(setsid sleep {seconds} &) ; (sleep {seconds}; echo late > /app/work/late) & echo", 60)
    assert not [process for process in psutil.process_iter(["cmdline"]) if seconds in (process.info["cmdline"] or ())]
    result = await shell.run("sleep 617", 0.5)
    assert (result.returncode, result.ended_by) == (-1, "time")
    many = "import subprocess; [subprocess.Popen(['sleep', '617']) for _ in range(100)]"
    assert "temporarily unavailable" in await output(shell, f'python -c "{many}"')


@needs_namespaces
async def test_copies_belong_to_the_sandbox_and_unreadable_files_are_removed(
    shell: ShellSandbox, tmp_path: Path
) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").write_text("old")
    shell.copy(tmp_path / "d", "/data/in")
    shell.copy(tmp_path / "d/x", "/app/work/y")
    assert await output(shell, "echo new > /data/in/x; cat /data/in/x y; rm y") == "new\nold"
    assert (tmp_path / "d/x").read_text() == "old"
    size = shell.size()
    await shell.run("mkdir -p deep/er; head -c 100000 /dev/zero > deep/er/f; chmod 000 deep/er deep", 60)
    assert shell.size() >= size


@needs_namespaces
async def test_limits_hold() -> None:
    shell = ShellSandbox([], "/tmp", limits=replace(SandboxLimits(), memory=2**30, file_size=2**20, output=1000))
    try:
        assert "File too large" in await output(shell, "head -c 2000000 /dev/zero > big")
        assert "MemoryError" in await output(shell, "python -c 'bytearray(2 << 30)'")
        assert "more bytes were cut" in await output(shell, "yes | head -c 100000")
    finally:
        shell.close()


@needs_namespaces
def test_without_user_namespaces_an_error_says_what_is_needed() -> None:
    code = """
import asyncio
from astuner.errors import SandboxError
from astuner.sandbox import ShellSandbox
shell = ShellSandbox(["/app"], "/app")
try:
    asyncio.run(shell.run("echo runs", 30))
except SandboxError as error:
    print(error)
finally:
    shell.close()
"""
    command = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" "$@"'
    arguments = ["sh", "-c", command, sys.executable, "-c", code]
    ended = subprocess.run(
        ["unshare", "--user", "--map-root-user", *arguments], capture_output=True, text=True, check=True
    )
    assert "cannot make a sandbox with its own file system" in ended.stdout
    assert "user.max_user_namespaces" in ended.stdout


async def test_python_programs_get_files_and_programs_that_are_missing_are_named() -> None:
    result = await run_python_program(
        "import solution; print(solution.double(4))", 60, files={"solution.py": "def double(x): return 2 * x"}
    )
    assert (result.returncode, result.stdout) == (0, "8\n")
    result = await run_program(["no-such-program"], 60)
    assert (result.returncode, result.stderr) == (127, "no-such-program: No such file or directory\n")
