"""`--backbone=debug` with `rollout.name: vllm`: a server that astuner starts, keeps warm on request, and stops.

Each test runs on a fake vLLM with the same command line; those marked `vllm` also run on the real one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.run_record import read_episode, read_index
from astuner.schema import LlmCall
from astuner.system.localhost import free_port
from tests.launcher.liveness import lives, wait_for
from tests.launcher.vllm_commands import Commands
from tests.llm_engine.completions_server import listening, serving
from tests.preloaded import run_python

ROOT = Path(__file__).parents[2]
FAKE_VLLM = Path(__file__).parent / "fake_vllm"
RUN = Path("launcher_record/run-debug")
HANGS = "astuner.rollout.agentscope_workflow='agents->HangsFromTheStart'"
GREEDY = "--validation"


@pytest.fixture(scope="module")
def engine_port(model_for_vllm: Path) -> Iterator[int]:
    """The port of the engine from which all fake servers sample."""
    model = AutoModelForCausalLM.from_pretrained(model_for_vllm, dtype=torch.float32)
    engine = EmbeddedEngine(model, max_model_len=200)
    with contextlib.closing(engine), serving(engine) as url:
        yield int(url.rpartition(":")[2].partition("/")[0])


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.vllm)])
def commands(
    request: pytest.FixtureRequest,
    folder: Path,
    model_for_vllm: Path,
    engine_port: int,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Commands]:
    yaml = (folder / "run.yaml").read_text()
    (folder / "run.yaml").write_text(yaml.replace("path: model\n", f"path: {model_for_vllm}\n"))
    port = free_port()
    fake_vllm = [str(FAKE_VLLM)] if request.param == "fake" else []
    cache = tmp_path_factory.mktemp("cache")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([*fake_vllm, str(ROOT)]), "XDG_CACHE_HOME": str(cache)}
    env["FAKE_VLLM_ENGINE"] = str(engine_port)
    commands = Commands(folder, port, env)
    yield commands
    for run in commands.started:
        run.kill()
        run.wait()
    if commands.state_file().exists():
        commands.start("stop-engine").wait(60)
    wait_for(lambda: not commands.guards(), 60)


fake_vllm_only = pytest.mark.parametrize("commands", ["fake"], indirect=True)


def calls(split: str = "train") -> list[LlmCall]:
    """Return the calls of the run, ordered by episode id, which is the same in every run."""
    entries = sorted((entry for entry in read_index(RUN) if entry.split == split), key=lambda entry: entry.episode_id)
    return [call for entry in entries for call in read_episode(RUN / entry.path).calls]


def assert_logprobs_of_the_model(model_folder: Path, calls: list[LlmCall]) -> None:
    """Compare logprobs with transformers' forward pass."""
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    for call in calls:
        ids = torch.tensor([call.prompt_ids + call.completion_ids])
        with torch.inference_mode():
            logits = model(ids).logits[0, len(call.prompt_ids) - 1 : -1]
        scaled = logits / (call.sampling.temperature or 1.0)
        expected = scaled.log_softmax(-1).gather(-1, ids[0, len(call.prompt_ids) :, None])[:, 0]
        torch.testing.assert_close(torch.tensor(call.logprobs), expected, atol=1e-4, rtol=0)


def test_a_server_for_one_run(commands: Commands, model_for_vllm: Path):
    run = commands.debug(episodes=8)
    server = commands.server_of(run)
    code, output = commands.wait(run)
    assert code == 0, output
    assert "a training step would use 8 of 8 episodes" in output
    assert len(calls()) == 8
    assert {call.sampling.temperature for call in calls()} == {0.9}
    assert_logprobs_of_the_model(model_for_vllm, calls())
    server.assert_gone()
    assert not commands.state_file().exists()
    assert (RUN / "services/vllm.log").stat().st_size > 0


def test_no_server_outlives_a_launcher_that_is_killed(commands: Commands):
    run = commands.debug(HANGS)
    server = commands.server_of(run)
    server.assert_lives()
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(lives, server.pids)), 60)
    server.assert_gone()


def test_a_warm_server_is_reused_and_agrees_with_the_embedded_engine(commands: Commands, model_for_vllm: Path):
    code, output = commands.wait(commands.debug("--keep-engine"))
    assert code == 0, output
    assert "vllm: ready after" in output
    server = commands.server()
    server.assert_lives()

    code, output = commands.wait(commands.debug(GREEDY))
    assert code == 0, output
    assert f"using the warm server on port {commands.port} (process {server.pids[1]})" in output
    assert "vllm: ready after" not in output
    assert commands.server() == server
    greedy = calls("val")
    assert_logprobs_of_the_model(model_for_vllm, greedy)
    assert commands.wait(commands.start("--conf", "run.yaml", "--backbone=debug", GREEDY))[0] == 0
    embedded = calls("val")
    assert [call.completion_ids for call in embedded] == [call.completion_ids for call in greedy]
    assert [call.prompt_ids for call in embedded] == [call.prompt_ids for call in greedy]
    for call, expected in zip(embedded, greedy, strict=True):
        assert call.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    code, output = commands.wait(commands.debug("astuner.debug.debug_vllm_seed=7"))
    assert code == 0, output
    assert f"stopping the warm server (process {server.pids[1]}) to start a new one: seed 12345 → 7" in output
    server.assert_gone()
    assert commands.guards() == []  # the new server is stopped with the run
    assert not commands.state_file().exists()


@fake_vllm_only
def test_a_server_in_use_is_not_stopped(commands: Commands):
    run = commands.debug("--keep-engine", HANGS)
    commands.server_of(run, "vllm: the server keeps running")
    server = commands.server()
    busy = "is in use by another run; wait until that run has ended, or choose another debug.debug_vllm_port"
    code, output = commands.wait(commands.debug("astuner.debug.debug_vllm_seed=7", "--exp-dir=elsewhere"))
    assert (code, busy in output) == (1, True), output
    code, output = commands.wait(commands.start("stop-engine"))
    assert (code, busy in output) == (1, True), output
    code, output = commands.wait(commands.debug("--exp-dir=elsewhere"))
    assert code == 0, output  # sharing it is allowed
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    assert commands.server() == server


@fake_vllm_only
def test_a_killed_warm_server_is_started_again(commands: Commands):
    code, output = commands.wait(commands.debug("--keep-engine"))
    assert code == 0, output
    first = commands.server()
    os.kill(first.pids[1], signal.SIGKILL)
    wait_for(lambda: not any(map(lives, first.pids)), 60)
    first.assert_gone()
    code, output = commands.wait(commands.debug("--keep-engine"))
    assert (code, "vllm: ready after" in output) == (0, True), output
    second = commands.server()
    os.kill(second.pids[0], signal.SIGKILL)  # the guard
    code, output = commands.wait(commands.start("stop-engine"))
    # On Linux, the server gets SIGTERM when the guard dies, so that it may have ended before the command looks.
    ended = any(text in output for text in (f"(process {second.pids[1]})", "no warm vLLM server is running"))
    assert (code, ended) == (0, True), output
    wait_for(lambda: not any(map(lives, second.pids)), 60)


@fake_vllm_only
def test_ctrl_c_stops_even_a_stubborn_server(commands: Commands):
    commands.env["FAKE_VLLM"] = "stubborn"
    run = commands.debug(HANGS)
    server = commands.server_of(run)
    server.assert_lives()
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130, commands.output
    server.assert_gone()


@fake_vllm_only
def test_a_launcher_killed_before_the_server_is_ready_leaves_no_server(commands: Commands):
    commands.env["FAKE_VLLM"] = "hangs"
    run = commands.debug("--keep-engine")
    wait_for(lambda: commands.guards() and len(commands.server().pids) >= 3 and commands.server().memory)
    server = commands.server()
    server.assert_lives()
    run.kill()
    run.wait()
    wait_for(lambda: not any(map(lives, server.pids)), 60)
    server.assert_gone()
    assert not commands.state_file().exists()


@fake_vllm_only
def test_a_server_that_does_not_start(commands: Commands):
    commands.env["FAKE_VLLM"] = "fails"
    code, output = commands.wait(commands.debug())
    assert code == 1, output
    for part in (
        "error: vLLM ended with exit code 1 before it was ready",
        "likely cause: (EngineCore) ValueError: Free memory on device",
        "its last lines:\n",
        "    Engine core initialization failed.",
        "how to fix it: lower rollout.gpu_memory_utilization",
        "log: ",
    ):
        assert part in output
    commands.env["FAKE_VLLM"] = "hangs"
    code, output = commands.wait(commands.debug("astuner.debug.debug_vllm_timeout=1", "--keep-engine"))
    assert code == 1, output
    assert "error: vLLM was not ready within 1 s (debug.debug_vllm_timeout)" in output
    commands.env["FAKE_VLLM"] = "breaks"
    code, output = commands.wait(commands.debug())
    assert code == 1, output
    assert "/completions failed (500)" in output
    assert "likely cause: (Worker) RuntimeError: Unsupported CPU attention" in output
    assert commands.guards() == []


@fake_vllm_only
def test_a_port_of_another_process(commands: Commands):
    with listening(commands.port) as sock:
        sock.listen()
        code, output = commands.wait(commands.debug())
    holder = f"process {os.getpid()} ({psutil.Process().name()})"
    assert code == 1
    assert f"debug.debug_vllm_port {commands.port} is in use by {holder}, which astuner did not start" in output


@fake_vllm_only
def test_stop_engine_stops_a_warm_server_but_no_other_process(commands: Commands):
    code, output = commands.wait(commands.debug("--keep-engine"))
    assert code == 0, output
    state = json.loads(commands.state_file().read_text())
    server = commands.server()
    server.assert_lives()
    code, output = commands.wait(commands.start("stop-engine"))
    assert (code, output) == (0, f"stopped the warm vLLM server on port {commands.port} (process {server.pids[1]})\n")
    server.assert_gone()
    stranger = subprocess.Popen(["sleep", "600"])
    reaper = threading.Thread(target=stranger.wait)
    reaper.start()
    try:
        process = {"pid": stranger.pid, "started": psutil.Process(stranger.pid).create_time()}
        commands.state_file().write_text(json.dumps(state | {"server": process, "guard": process}))
        assert commands.wait(commands.start("stop-engine")) == (0, "no warm vLLM server is running\n")
        assert lives(stranger.pid)
        assert not commands.state_file().exists()
    finally:
        stranger.kill()
        reaper.join()


@fake_vllm_only
def test_vllm_is_never_imported_by_the_launcher(commands: Commands):
    code = (
        f"import sys; sys.argv = ['astuner', '--conf', 'run.yaml', '--backbone=debug', 'astuner.rollout.name=vllm', "
        f"'astuner.debug.debug_vllm_port={commands.port}']\n"
        "from astuner.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as end: assert end.code == 0\n"
        "print('\\n'.join(sys.modules))"
    )
    ended = run_python("-c", code, cwd=commands.folder, env=commands.env)
    assert ended.returncode == 0, ended.stderr
    loaded = ended.stdout.split()
    assert "astuner.llm_engine.vllm_server.vllm_process" in loaded
    assert [name for name in loaded if name.split(".")[0] in ("vllm", "ray", "verl", "trinity")] == []


def test_a_model_that_vllm_does_not_support_on_a_cpu(commands: Commands, model_folder: Path):
    code, output = commands.wait(commands.debug(f"astuner.model.path={model_folder}"))
    assert code == 1, output
    assert "has attention heads of size 16; on a CPU, vLLM supports sizes 32, 64, 80" in output
    assert "rollout.name: embedded" in output
