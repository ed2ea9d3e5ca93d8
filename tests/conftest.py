"""Shared fixtures: a tiny tokenizer and model, made once a session."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TINKER_TELEMETRY"] = "0"  # a client that outlives its server complains of it for minutes
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Tiny models gain nothing from a second thread, and slow down if other processes compute at the same time.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# `backbone: auto` is local in the tests, even on a machine with several GPUs.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "0")
# The width and the colors of the terminal are the same everywhere.
os.environ.pop("COLUMNS", None)
os.environ.pop("FORCE_COLOR", None)
os.environ.pop("NO_COLOR", None)
# Each of the processes that the tests start would compile astuner again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A command would re-execute itself in the developer's environment of the backbone, and end the tests.
os.environ["ASTUNER_ENVIRONMENTS"] = os.devnull

import importlib.util
import random
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import hypothesis
import pytest
from loguru import logger

from astuner.doors import DOORS
from astuner.system import forking
from tests.examples import FEW, FULL, NIGHTLY
from tests.preloaded import NO_PLOTS, interpreter, keep_server

sys.dont_write_bytecode = False
# Their assertions show values, as those in test files do.
pytest.register_assert_rewrite("tests.backbone.runs", "tests.backbone.sampling_runs", "tests.backbone.spec_pages")

# Examples are not timed: two test processes share two cores, and one slow example is no failure.
hypothesis.settings.register_profile("astuner", deadline=None, max_examples=FEW)
hypothesis.settings.register_profile("nightly", deadline=None, max_examples=FULL)
hypothesis.settings.load_profile("nightly" if NIGHTLY else "astuner")

# A shell that starts tests in the background ignores Ctrl-C, and `nohup` ignores the end of the terminal. The processes
# that the tests start would inherit this.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a real vLLM, verl, Trinity or agent framework where it is not installed."""
    # Trinity's environment has an older verl, without TransferQueue.
    needed = {
        "vllm": (("vllm",), "the environment of .ci/nightly"),
        "verl": (("transfer_queue",), ".ci/verl_run"),
        "trinity": (("trinity",), ".ci/trinity_run"),
        "verl_vllm": (("transfer_queue", "vllm"), "the environment of .ci/nightly"),
        "langgraph": (("langgraph", "langchain_openai"), ".ci/frameworks"),
        "autogen": (("autogen_agentchat", "autogen_ext"), ".ci/frameworks"),
        "openai_agents": (("agents",), ".ci/frameworks"),
        "pydantic_ai": (("pydantic_ai",), ".ci/frameworks"),
        "smolagents": (("smolagents",), ".ci/frameworks"),
        "google_adk": (("litellm",), ".ci/frameworks"),
    }
    for marker, (packages, where) in needed.items():
        missing = [package for package in packages if importlib.util.find_spec(package) is None]
        if missing:
            skip = pytest.mark.skip(reason=f"not installed here: {', '.join(missing)}; {where} runs this")
            for item in items:
                if item.get_closest_marker(marker) is not None:
                    item.add_marker(skip)
    if not (Path(os.environ.get("ASTUNER_FRAMEWORKS", os.devnull)) / "agentscope2").is_dir():
        for item in items:
            if item.get_closest_marker("agentscope2") is not None:
                item.add_marker(pytest.mark.skip(reason="no environment agentscope2; .ci/frameworks runs this"))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Start the server of `tests.preloaded` in the process that starts the test processes.

    A test process ends the processes that it has gained during an episode, and the server's forks would be among them.
    """
    if session.config.getoption("numprocesses", None):
        keep_server()


@pytest.fixture(scope="session", autouse=True)
def workers_are_forked_from_the_tests_server() -> Iterator[None]:
    """Fork what starts the episode workers of runs in this process, where the run itself would start an interpreter.

    A process of the tests has threads, so that it cannot be forked, and the imports take four seconds.
    """
    from astuner.backbone.episode_workers import fork_server

    spawned = fork_server._spawned

    def forked(job: fork_server.ForkServerJob, requests: socket.socket) -> int:
        forking.interpreter = interpreter()
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("RUN_PID", str(os.getpid()))  # for agents that signal the run
            return spawned(job, requests)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forking, "interpreter", forking.interpreter)
        patch.setattr(fork_server, "_spawned", forked)
        yield


@pytest.fixture(autouse=True)
def plots_are_drawn_where_a_test_looks_at_them(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let runs end without their plots, which take a third of a short run's time, except in tests marked `plots`."""
    if request.node.get_closest_marker("plots") is None:
        monkeypatch.setitem(cast(dict[str, str], DOORS["record"]), "plots", NO_PLOTS)


@pytest.fixture
def install_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Return a function that puts an `nvidia-smi` on the PATH that lists a number of GPUs."""

    def install(number: int) -> None:
        tool = tmp_path / "driver" / "nvidia-smi"
        tool.parent.mkdir(exist_ok=True)
        lines = [f"GPU {index}: NVIDIA H100 (UUID: GPU-{index})" for index in range(number)]
        tool.write_text("\n".join(["#!/bin/sh", "cat <<END", *lines, "END"]) + "\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tool.parent}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    return install


@pytest.fixture(autouse=True)
def imports_of_the_test_are_undone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Restore `sys.path`, and forget the users' modules that a test imported.

    These are in temporary folders of the tests, or files such as `agents.py` of the folder `tests`.
    """
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    # Not the system's temporary folder, which may contain the virtual environment.
    temporary = str(tmp_path_factory.getbasetemp().resolve())
    folders = (temporary, str(Path(__file__).resolve().parent))
    for name in sorted(set(sys.modules) - modules, reverse=True):  # submodules first: a namespace asks for its parent
        # Reading an attribute that a lazy module does not have would import its content.
        content = getattr(sys.modules[name], "__dict__", {})
        try:
            files = [content["__file__"]] if content.get("__file__") else list(content.get("__path__", ()))
        except KeyError:  # a namespace package whose parent the test removed from sys.modules
            files = [temporary]
        if any(os.path.realpath(file).startswith(folders) for file in files) and not f"{name}.".startswith("tests."):
            del sys.modules[name]


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def conversation(rng: random.Random) -> dict[str, Any]:
    """Return a transcript with a tool call."""
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    call = {"name": "add", "arguments": f'{{"a": {a}, "b": {b}}}'}
    return {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": f"What is {a} + {b}?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
            {"role": "tool", "content": str(a + b), "tool_call_id": "1", "name": "add"},
            {"role": "assistant", "content": f"\\boxed{{{a + b}}}"},
        ],
        "tools": TOOLS,
    }


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """A byte-level BPE tokenizer with Qwen's chat markup."""
    from tutorial.tiny_tokenizer import build_tokenizer

    rng = random.Random(0)
    return build_tokenizer([conversation(rng) for _ in range(50)], context=512)


def saved_model(tokenizer: Any, folder: Path, *, hidden_size: int, head_dim: int, context: int = 512) -> Path:
    """Write a random Qwen3-shaped model of some 50,000 parameters, with that tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=context,
        initializer_range=0.1,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def model_folder(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model."""
    return saved_model(tokenizer, tmp_path_factory.mktemp("models") / "tiny", hidden_size=32, head_dim=16)


@pytest.fixture(scope="session")
def model_for_vllm(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One with attention heads of a size that vLLM has on a CPU."""
    return saved_model(tokenizer, tmp_path_factory.mktemp("models") / "for_vllm", hidden_size=64, head_dim=32)


@pytest.fixture
def log() -> Iterator[list[str]]:
    """The messages logged during the test."""
    messages: list[str] = []
    sink = logger.add(lambda message: messages.append(message.record["message"]), level="INFO", format="{message}")
    yield messages
    logger.remove(sink)
