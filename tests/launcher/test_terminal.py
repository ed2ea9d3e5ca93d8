"""Output of a run on a terminal, in a pipe and in a file: readable, without library noise, without secrets."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from astuner.cli.main import main
from astuner.launcher.console import filtered_output
from astuner.run_record import read_summary
from tests.launcher.conftest import Command

RUN = Path("launcher_record/run")
SECRETS = {
    "OPENAI_API_KEY": "plainlooking-0a1b2c3d",
    "HF_TOKEN": "hf_abcdefghijklmnop1234",
    "DASHSCOPE_API_KEY": "sk-aaaa|sk-bbbb",
}
PIECES = ("plainlooking-0a1b2c3d", "hf_abcdefghijklmnop1234", "sk-aaaa", "sk-bbbb")


def test_no_secret_of_the_environment_is_written_anywhere(
    train: Command, astuner: Command, folder: Path, monkeypatch: pytest.MonkeyPatch
):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    agent = "rollout.agentscope_workflow='agents->TellsSecrets'"
    settings = (agent, "rollout.max_model_len=400", "trainer_common.logger=[console,tensorboard]")
    results = [
        train(*settings, f"project_name='{SECRETS['OPENAI_API_KEY']}'"),
        train(*settings, "task_judge.timeout=sk-aaaa"),
        train("model.path=./sk-bbbb"),
        train("rollout.agentscope_workflow='agents->plainlooking-0a1b2c3d'"),
        astuner("check", "--conf", "run.yaml", "--dry-run", *(f"astuner.{setting}" for setting in settings)),
    ]
    assert [ended.code for ended in results] == [0, 1, 1, 1, 0], results
    assert "printed [redacted] [redacted] [redacted]" in results[0].out
    assert "to stderr [redacted]" in results[0].out
    assert "401: [redacted]" in results[0].out
    written = {str(path): path.read_bytes() for path in (folder / "launcher_record").rglob("*") if path.is_file()}
    assert any("tfevents" in path for path in written)
    shown = {**written, **{f"command {n}": ended.out.encode() for n, ended in enumerate(results)}}
    for place, content in shown.items():
        for piece in PIECES:
            assert piece.encode() not in content, (place, piece)
            assert piece.encode() not in place.encode()


def test_a_run_in_a_pipe_with_closed_input_is_plain_text(folder: Path):
    text = (folder / "run.yaml").read_text().replace("logger:\n    - console", "logger: [console, tensorboard]")
    (folder / "run.yaml").write_text(text)
    command = f"exec {sys.executable} -m astuner --conf run.yaml <&- >out.txt 2>err.txt"
    ended = subprocess.run(["bash", "-c", command], cwd=folder, timeout=120, check=False)
    out, err = (folder / "out.txt").read_text(), (folder / "err.txt").read_text()
    assert (ended.returncode, out) == (0, ""), err
    assert not re.search(r"[\x1b\r\b]", err)
    assert "\n\n" not in err
    for noise in ("Loading weights", "Writing model", "it/s", "Warning", "[transformers]"):
        assert noise not in err
    starts = [line[9:18] for line in err.splitlines()[:9]]
    assert starts[:5] == ["reading r", "backbone ", "loading t", "reading t", "loading t"]
    assert starts[5:] == ["training:", "step 1/2 ", "step 2/2 ", "step 2/2 "]
    assert f"record: {folder / RUN}" in err.splitlines()[-1]


def test_a_terminal_shows_the_progress_of_every_phase(folder: Path, monkeypatch: pytest.MonkeyPatch):
    shown = _on_a_terminal(monkeypatch, "astuner.trainer_common.val_before_train=true")
    phases = ("training", "validation before", "validation after")
    steps = ("step 1/2: rollout", "step 1/2: update", "step 2/2: rollout", "step 2/2: update")
    for phase in (*phases, *steps):
        assert phase in shown
    assert "━" in shown
    assert "step 1/2  reward 1.50" in shown
    assert "Loading weights" not in shown
    assert shown.rstrip().endswith(str(RUN))


def _on_a_terminal(monkeypatch: pytest.MonkeyPatch, *settings: str) -> str:
    """Run the command with a pseudo-terminal as stderr; return what it would show, without control sequences."""
    reader, writer = os.openpty()
    chunks: list[bytes] = []

    def drain() -> None:
        while chunk := _read(reader):
            chunks.append(chunk)

    thread = threading.Thread(target=drain)
    thread.start()
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr(sys, "argv", ["astuner", "--conf", "run.yaml", *settings])
    with os.fdopen(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with pytest.raises(SystemExit, match="0"):
            main()
    thread.join()
    os.close(reader)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(chunks).decode())


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:  # on Linux, the other side of the pseudo-terminal is closed
        return b""


def test_a_run_outlives_its_reader(folder: Path, monkeypatch: pytest.MonkeyPatch):
    reader, writer = os.pipe()
    os.close(reader)
    monkeypatch.setattr(sys, "argv", ["astuner", "--conf", "run.yaml"])
    stream = os.fdopen(writer, "w")
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert read_summary(RUN).steps == 2
    with pytest.raises(BrokenPipeError):
        stream.close()


def test_a_run_without_any_standard_stream(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["astuner", "--conf", "run.yaml"])
    for name in ("stdin", "stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    with pytest.raises(SystemExit, match="0"):
        main()
    assert read_summary(RUN).steps == 2


def test_output_and_warnings_of_libraries_do_not_reach_the_terminal(
    capsys: pytest.CaptureFixture[str], log: list[str], model_folder: Path
):
    from transformers import AutoModelForCausalLM, logging

    level = logging.get_verbosity()
    with filtered_output(), warnings.catch_warnings():
        warnings.simplefilter("always")
        AutoModelForCausalLM.from_pretrained(model_folder)
        warnings.warn("only a developer can fix this", stacklevel=1)
        logging.get_logger("transformers.any").warning("noise")
    assert capsys.readouterr() == ("", "")
    assert any("UserWarning: only a developer can fix this" in line for line in log)
    assert logging.get_verbosity() == level
    assert logging.is_progress_bar_enabled()
