"""`--backbone=debug` with `rollout.name: vllm`: a server that astuner starts, keeps warm on request, and ends.

Each test runs on a stand-in that takes vLLM's command line, and those marked `vllm` also on the real one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.run_record import read_episode, read_index
from astuner.schema import LlmCall
from tests.launcher.liveness import lives, wait_for
from tests.launcher.service_processes import free_port
from tests.launcher.vllm_commands import Commands
from tests.llm_engine.completions_server import listening

ROOT = Path(__file__).parents[2]
STAND_IN = Path(__file__).parent / "stand_in"
RUN = Path("launcher_record/run-debug")
HANGS = "astuner.rollout.agentscope_workflow='agents->HangsFromTheStart'"
GREEDY = "--validation"


@pytest.fixture(params=["stand-in", pytest.param("real", marks=pytest.mark.vllm)])
def commands(
    request: pytest.FixtureRequest, folder: Path, model_for_vllm: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Commands]:
    yaml = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(yaml.replace("path: model\n", f"path: {model_for_vllm}\n"))
    port = free_port()
    stand_in = [str(STAND_IN)] if request.param == "stand-in" else []
    cache = tmp_path_factory.mktemp("cache")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*stand_in, str(ROOT)]), "XDG_CACHE_HOME": str(cache)}
    commands = Commands(folder, port, env)
    yield commands
    for run in commands.started:
        run.kill()
        run.wait()
    commands.start("stop-engine").wait(60)
    wait_for(lambda: not commands.guards(), 60)


stand_in_only = pytest.mark.parametrize("commands", ["stand-in"], indirect=True)


def calls(split: str = "train") -> list[LlmCall]:
    """The calls of the run, in the order of their episodes' ids, which are the same in every run."""
    entries = sorted((entry for entry in read_index(RUN) if entry.split == split), key=lambda entry: entry.episode_id)
    return [call for entry in entries for call in read_episode(RUN / entry.path).calls]


def assert_as_the_model_says(model_folder: Path, found: list[LlmCall]) -> None:
    """Check logprobs against transformers' forward pass."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for call in found:
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1]
        scaled = logits / (call.sampling.temperature or 1.0)
        expected = scaled.log_softmax(-1).gather(-1, ids[0, len(call.prompt_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(call.logprobs), expected, atol=1e-4, rtol=0)


def test_a_server_for_one_run(commands: Commands, model_for_vllm: Path):
    run = commands.debug()
    server = commands.server_of(run)
    code, said = commands.said(run)
    assert code == 0, said
    assert "a training step would have used 8 of 8 episodes" in said
    assert len(calls()) == 8
    assert {call.sampling.temperature for call in calls()} == {0.9}
    assert_as_the_model_says(model_for_vllm, calls())
    server.assert_gone()
    assert not commands.noted().exists()
    assert (RUN / "services/vllm.log").stat().st_size > 0


def test_no_server_outlives_a_launcher_that_is_killed(commands: Commands):
    run = commands.debug(HANGS)
    server = commands.server_of(run)
    server.assert_lives()
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(lives, server.pids)), 60)
    server.assert_gone()


def test_a_kept_server_is_found_warm_and_agrees_with_the_embedded_engine(commands: Commands, model_for_vllm: Path):
    code, said = commands.said(commands.debug("--keep-engine"))
    assert code == 0, said
    assert "vllm: ready after" in said
    server = commands.server()
    server.assert_lives()

    code, said = commands.said(commands.debug(GREEDY))
    assert code == 0, said
    assert f"the server on port {commands.port} (process {server.pids[1]}) is warm" in said
    assert "vllm: ready after" not in said
    assert commands.server() == server
    greedy = calls("val")
    assert_as_the_model_says(model_for_vllm, greedy)
    assert commands.said(commands.start("--conf", "run.yaml", "--backbone=debug", GREEDY))[0] == 0
    embedded = calls("val")
    assert [call.completion_ids for call in embedded] == [call.completion_ids for call in greedy]
    assert [call.prompt_ids for call in embedded] == [call.prompt_ids for call in greedy]
    for one, other in zip(embedded, greedy, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)

    code, said = commands.said(commands.debug("astuner.debug.debug_vllm_seed=7"))
    assert code == 0, said
    assert f"ending the kept server (process {server.pids[1]}) to start a new one: seed 12345 → 7" in said
    server.assert_gone()
    assert commands.guards() == []  # the new one was not to be kept
    assert not commands.noted().exists()


@stand_in_only
def test_a_server_in_use_is_not_ended(commands: Commands):
    run = commands.debug("--keep-engine", HANGS)
    commands.server_of(run, "vllm: the server stays")
    server = commands.server()
    busy = "is in use by another run; wait until that has ended, or choose another debug.debug_vllm_port"
    code, said = commands.said(commands.debug("astuner.debug.debug_vllm_seed=7", "--exp-dir=elsewhere"))
    assert (code, busy in said) == (1, True), said
    code, said = commands.said(commands.start("stop-engine"))
    assert (code, busy in said) == (1, True), said
    code, said = commands.said(commands.debug("--exp-dir=elsewhere"))
    assert code == 0, said  # to share it is well
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert commands.server() == server


@stand_in_only
def test_a_kept_server_that_was_killed_is_started_anew(commands: Commands):
    assert commands.said(commands.debug("--keep-engine"))[0] == 0
    first = commands.server()
    os.kill(first.pids[1], signal.SIGKILL)
    wait_for(lambda: not any(map(lives, first.pids)), 60)
    first.assert_gone()
    code, said = commands.said(commands.debug("--keep-engine"))
    assert (code, "vllm: ready after" in said) == (0, True), said
    second = commands.server()
    os.kill(second.pids[0], signal.SIGKILL)  # the guard
    code, said = commands.said(commands.start("stop-engine"))
    assert (code, f"(process {second.pids[1]})" in said) == (0, True), said
    assert not any(map(lives, second.pids))


@stand_in_only
def test_ctrl_c_ends_the_server_even_a_stubborn_one(commands: Commands):
    commands.env["STAND_IN"] = "stubborn"
    run = commands.debug(HANGS)
    server = commands.server_of(run)
    server.assert_lives()
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, commands.printed
    server.assert_gone()


@stand_in_only
def test_a_launcher_killed_before_the_server_is_ready_leaves_none(commands: Commands):
    commands.env["STAND_IN"] = "hangs"
    run = commands.debug("--keep-engine")
    wait_for(lambda: commands.guards() and len(commands.server().pids) >= 3 and commands.server().memory)
    server = commands.server()
    server.assert_lives()
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(lives, server.pids)), 60)
    server.assert_gone()
    assert not commands.noted().exists()


@stand_in_only
def test_a_server_that_does_not_start(commands: Commands):
    commands.env["STAND_IN"] = "fails"
    code, said = commands.said(commands.debug())
    assert code == 1, said
    for part in (
        "error: vLLM ended with exit code 1 before it was ready",
        "it seems to be: (EngineCore) ValueError: Free memory on device",
        "its last lines:\n",
        "    Engine core initialization failed.",
        "what to do: lower rollout.gpu_memory_utilization",
        "log: ",
    ):
        assert part in said
    commands.env["STAND_IN"] = "hangs"
    code, said = commands.said(commands.debug("astuner.debug.debug_vllm_timeout=1", "--keep-engine"))
    assert code == 1, said
    assert "error: vLLM was not ready within 1 s (debug.debug_vllm_timeout)" in said
    commands.env["STAND_IN"] = "breaks"
    code, said = commands.said(commands.debug())
    assert code == 1, said
    assert "/completions failed (500)" in said
    assert "it seems to be: (Worker) RuntimeError: Unsupported CPU attention" in said
    assert commands.guards() == []


@stand_in_only
def test_a_port_that_somebody_else_holds(commands: Commands):
    with listening(commands.port) as place:
        place.listen()
        code, said = commands.said(commands.debug())
    holder = f"process {os.getpid()} ({psutil.Process().name()})"
    assert code == 1
    assert f"debug.debug_vllm_port {commands.port} is in use by {holder}, which astuner did not start" in said


@stand_in_only
def test_a_kept_server_is_stopped_by_a_command_which_believes_no_note_about_others(commands: Commands):
    assert commands.said(commands.debug("--keep-engine"))[0] == 0
    noted = json.loads(commands.noted().read_text())
    server = commands.server()
    server.assert_lives()
    code, said = commands.said(commands.start("stop-engine"))
    assert (code, said) == (0, f"stopped the vLLM server on port {commands.port} (process {server.pids[1]})\n")
    server.assert_gone()
    stranger = subprocess.Popen(["sleep", "600"])
    reaper = threading.Thread(target=stranger.wait)
    reaper.start()
    try:
        process = {"pid": stranger.pid, "started": psutil.Process(stranger.pid).create_time()}
        commands.noted().write_text(json.dumps(noted | {"server": process, "guard": process}))
        assert commands.said(commands.start("stop-engine")) == (0, "no vLLM server is kept\n")
        assert lives(stranger.pid)
        assert not commands.noted().exists()
    finally:
        stranger.kill()
        reaper.join()


@stand_in_only
def test_vllm_is_never_in_the_launchers_process(commands: Commands):
    code = (
        f"import sys; sys.argv = ['astuner', '--conf', 'run.yaml', '--backbone=debug', 'astuner.rollout.name=vllm', "
        f"'astuner.debug.debug_vllm_port={commands.port}']\n"
        "from astuner.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('\\n'.join(sys.modules))"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, env=commands.env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr
    loaded = ended.stdout.split()
    assert "astuner.backbone.vllm_server.server" in loaded
    assert [name for name in loaded if name.split(".")[0] in ("vllm", "ray", "verl", "trinity")] == []


def test_a_model_that_vllm_cannot_compute_on_a_cpu(commands: Commands, model_folder: Path):
    code, said = commands.said(commands.debug(f"astuner.model.path={model_folder}"))
    assert code == 1, said
    assert "has attention heads of size 16; on a CPU, vLLM computes sizes 32, 64, 80" in said
    assert "rollout.name: embedded" in said
