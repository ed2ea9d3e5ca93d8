"""Redacted output of a worker process."""

from __future__ import annotations

import fcntl
import os
import struct
import subprocess
import sys
import termios
from pathlib import Path

SCRIPT = """
import sys
import termios
from pathlib import Path
from loguru import logger
from astuner.system.redaction.redactor import secret_variables
from astuner.system.redaction.output import redact_output
redact_output()
assert secret_variables()["AGENT_API_KEY"] == "not-for-everybody"
assert "HARMLESS" not in secret_variables()
print("out: not-for-everybody")
print("err: not-for-everybody", file=sys.stderr)
logger.info("log: not-for-everybody")
try:
    key = "not-for-everybody"
    raise RuntimeError(key)
except RuntimeError:
    logger.exception("traceback")
"""


def test_a_worker_prints_and_logs_no_secrets():
    environment = os.environ | {"AGENT_API_KEY": "not-for-everybody", "HARMLESS": "for-everybody"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout == "out: [redacted]\n"
    for line in ("err: [redacted]", "log: [redacted]", "RuntimeError: [redacted]"):
        assert line in done.stderr
    assert "not-for-everybody" not in done.stderr


ALL_WAYS = """
import ctypes, logging, os, subprocess, sys, time, traceback, warnings
from astuner.system.redaction.output import redacted_output
key = os.environ["AGENT_API_KEY"]
with redacted_output():
    print("print", key, flush=True)
    sys.stdout.writelines(["writelines ", key, "\\n"])
    sys.stdout.flush()
    sys.stdout.buffer.write(f"buffer {key}\\n".encode())
    sys.stdout.buffer.flush()
    os.write(1, f"os.write {key}\\n".encode())
    os.write(1, f"split {key[:7]}".encode())
    time.sleep(0.1)
    os.write(1, f"{key[7:]} done\\n".encode())
    os.write(1, b"bearer: Authorization: Bearer Abcd")
    time.sleep(0.1)
    os.write(1, b"efgh12345\\n")
    ctypes.CDLL(None).write(1, b"libc " + key.encode() + b"\\n", 6 + len(key))
    subprocess.run(["echo", "child", key])
    os.environ["LATE_PASS"] = "later-set-value"
    os.system("echo late $LATE_PASS")
    subprocess.run(["sh", "-c", "echo own $CHILD_PWD"], env={**os.environ, "CHILD_PWD": "for-the-child-only"})
    print("-----BEGIN PRIVATE KEY-----", flush=True)
    os.write(1, b"MIIabc\\n")
    os.write(1, b"-----END PRIVATE KEY-----\\n")
    print("x" * 200_000, flush=True)
    logging.warning("logging %s", key)
    warnings.warn("warnings " + key)
    try:
        raise RuntimeError("traceback " + key)
    except RuntimeError:
        traceback.print_exc()
    os.write(2, f"os.write {key}\\n".encode())
os.write(1, b"afterwards\\n")
"""


def test_no_way_of_printing_shows_a_secret() -> None:
    environment = os.environ | {"AGENT_API_KEY": "not-for-everybody"}
    done = subprocess.run(
        [sys.executable, "-c", ALL_WAYS], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.splitlines() == [
        "print [redacted]",
        "writelines [redacted]",
        "buffer [redacted]",
        "os.write [redacted]",
        "split [redacted] done",
        "bearer: Authorization: Bearer [redacted]",
        "libc [redacted]",
        "child [redacted]",
        "late [redacted]",
        "own [redacted]",
        "[redacted]",
        "x" * 200_000,
        "afterwards",
    ]
    assert "not-for-everybody" not in done.stderr
    for line in (
        "logging [redacted]",
        "warnings [redacted]",
        "RuntimeError: traceback [redacted]",
        "os.write [redacted]",
    ):
        assert line in done.stderr


def test_both_streams_in_one_file_keep_their_order(tmp_path: Path) -> None:
    script = """
import fcntl
import os
import struct
from astuner.system.redaction.output import redacted_output
with redacted_output():
    for number in range(200):
        os.write(1 + number % 2, f"{number}\\n".encode())
"""
    with (tmp_path / "both").open("wb") as file:
        subprocess.run([sys.executable, "-c", script], stdout=file, stderr=file, timeout=120, check=True)
    assert (tmp_path / "both").read_text().split() == [str(number) for number in range(200)]


def test_a_writer_that_dies_is_heard_to_its_last_word() -> None:
    script = """
import fcntl
import os
import struct
from astuner.system.redaction.output import redacted_output
with redacted_output():
    os.write(1, b"last words")
    os._exit(3)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (3, "last words")


def test_a_writer_without_readers_goes_on(tmp_path: Path) -> None:
    script = f"""
import fcntl
import os
import struct
from astuner.system.redaction.output import redacted_output
with redacted_output():
    for number in range(3000):
        os.write(1, b"x" * 100)
    open({str(tmp_path / "done")!r}, "w").close()
"""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, timeout=120, check=False)
    os.close(writer)
    assert done.returncode == 0
    assert (tmp_path / "done").exists()


def test_on_a_terminal_programs_find_a_terminal_and_prompts_appear_at_once() -> None:
    script = """
import os, subprocess, sys
from astuner.system.redaction.output import redacted_output
with redacted_output():
    print(sys.stdout.isatty(), os.get_terminal_size(1), os.environ["AGENT_API_KEY"], flush=True)
    subprocess.run(["sh", "-c", "test -t 1 && stty size <&1"])
    answer = input("name? ")
    print("\\x1b[31mhello", answer, "\\x1b[0m")
"""
    primary, secondary = os.openpty()
    fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    environment = os.environ | {"AGENT_API_KEY": "not-for-everybody"}
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=secondary, stdout=secondary, stderr=secondary, env=environment
    ) as process:
        os.close(secondary)
        shown = ""
        while not shown.endswith("name? "):
            shown += os.read(primary, 4096).decode()
        os.write(primary, b"Ada\n")
        while "\x1b[0m" not in shown:
            shown += os.read(primary, 4096).decode()
        assert process.wait(60) == 0
    os.close(primary)
    assert "True os.terminal_size(columns=101, lines=33) [redacted]" in shown
    assert "33 101" in shown
    assert "\x1b[31mhello Ada \x1b[0m" in shown
