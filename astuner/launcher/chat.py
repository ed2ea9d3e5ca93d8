"""`astuner chat`: talk to a model, or to the configured agent that uses it, on the terminal."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from astuner.backbone.episode_workers.messages import AgentJob
from astuner.backbone.training.agent import load_agent
from astuner.backbone.training.episode_placement import has_agent
from astuner.backbone.training.run_inputs import call_settings, model_path
from astuner.config.loading import load_config, resolve_names
from astuner.config.root import AstunerConfig
from astuner.debugging.breakpoints import active_breakpoints
from astuner.errors import AstunerError, ConfigError, ModelError, RecordError
from astuner.launcher.console import filtered_output, make_console
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.model_tuner.tuner import ModelTuner
from astuner.run_record.recorded_run import RecordedRun, find_run
from astuner.schema import Message, Task, WorkflowOutput, WorkflowTask
from astuner.system.control_characters import escape_control_characters
from astuner.system.redaction.redactor import redact
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_rollout.rollout import BatchRequest, TaskRollout
from astuner.viewer.transcripts import EpisodeTranscript

NEW_CONVERSATION = "/new"


def chat(model: str, conf: Path | None, exp_dir: Path, system: str, temperature: float, max_tokens: int) -> None:
    """Answer the lines of stdin until its end, Ctrl-C or Ctrl-D.

    Args:
        model: a run, the folder of a model, its Hugging Face name, or `package.module->function`.
        conf: the configuration of an agent that answers; None to talk to the model itself.
        system: the system message of a conversation with the model; "" for none.
        temperature: the temperature of a conversation with the model.
        max_tokens: the longest answer of the model, in tokens.

    Raises:
        AstunerError: the model or the agent cannot be loaded.
    """
    console = make_console(stderr=False)
    path, renderer = find_model(model, exp_dir)
    with filtered_output(), contextlib.ExitStack() as stack:
        answer: Callable[[str], None]
        forget: Callable[[], None]
        if conf is None:
            codec = ChatCodec(load_tokenizer(path), renderer)
            engine = stack.enter_context(open_engine(path, codec, None))
            settings = unlimited_calls(engine, temperature, max_tokens)
            partner = _Model(lambda: ModelTuner(engine, codec, settings, episode_id="chat"), system, console)
            answer, forget = partner.answer, partner.forget
        else:
            # Each question is a task, before which an agent keeps nothing.
            answer, forget = stack.enter_context(_agent(conf, path, console)), lambda: None
        if sys.stdin.isatty():
            click.echo(f"talking to {path}; {NEW_CONVERSATION} starts a new conversation, Ctrl-D ends")
        for question in _questions():
            if question == NEW_CONVERSATION:
                forget()
                continue
            try:
                answer(question)
            except AstunerError as error:
                # A question that is too long, for example, does not end the chat.
                console.print(Text(f"error: {redact(str(error))}", style="red"))


def find_model(name: str, exp_dir: Path) -> tuple[str, str]:
    """Return the path of a model, and its renderer.

    `name` is a run, a folder, a Hugging Face name, or `package.module->function`. RecordError, ModelError: there is
    no such run or model, or the run has no model.
    """
    with contextlib.suppress(RecordError):
        run = find_run(name, exp_dir)
        folder, config = run / "model", RecordedRun(run).config
        if not folder.is_dir():
            raise ModelError(
                f"the run {name!r} has no model yet, because it has not ended; to talk to its starting model, pass "
                f"--model {config.get('astuner.model.path')}"
            )
        renderer = config.get("astuner.model.renderer")
        return str(folder), renderer if isinstance(renderer, str) else "auto"
    if not Path(name).exists() and "/" not in name and "->" not in name:
        find_run(name, exp_dir)  # names of models on Hugging Face have a slash: it raises the error for a run
    return model_path(name, "--model", (Path.cwd(),)), "auto"


def _questions() -> Iterator[str]:
    is_terminal = sys.stdin.isatty()
    while True:
        try:
            line = input("> ") if is_terminal else sys.stdin.readline()
        except EOFError:
            return
        if not line and not is_terminal:
            return
        if line.strip():
            yield line.strip()


@contextlib.contextmanager
def _agent(conf: Path, path: str, console: Console) -> Iterator[Callable[[str], None]]:
    """Yield a function that has the agent of a configuration answer a question."""
    loaded = load_config(conf)
    config = resolve_names(loaded.config, loaded.path).astuner
    search = (Path.cwd(), loaded.path.absolute().parent)
    if not has_agent(config):
        raise ConfigError(f"{conf} names no agent (rollout.agentscope_workflow or workflow.command)")
    if not config.rollout.use_agentscope_protocol:
        raise ConfigError(
            f"{conf} plays the environment of each task with the built-in agent loop, which takes no questions"
        )
    codec = ChatCodec(load_tokenizer(path), config.model.renderer)
    episodes = load_agent(AgentJob(config, search, Path.cwd(), path, active_breakpoints()), codec)
    with open_engine(path, codec, config) as engine:
        # The configured judge needs the fields of a task, which a question does not have.
        episodes.runner = replace(episodes.runner, engine=engine, judge=_NoJudge(config.task_judge))
        rollout = TaskRollout(episodes)
        settings = call_settings(config, validation=True)
        numbers = iter(range(1, sys.maxsize))

        def ask(question: str) -> None:
            task = Task(f"question {next(numbers)}", question)
            (episode,) = rollout.run(BatchRequest([task], 1, "val", 0, config.trainer_common.seed, settings))
            console.print(EpisodeTranscript(None, episode, is_folded=False))

        try:
            yield ask
        finally:
            rollout.close()


@contextlib.contextmanager
def open_engine(path: str, codec: ChatCodec, config: AstunerConfig | None) -> Iterator[LlmEngine]:
    """Load a model for inference, with the settings of a configuration if there is one; close it after the block."""
    # After the check of the model's name, because these import PyTorch.
    from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
    from astuner.llm_engine.embedded.engine import EmbeddedEngine

    device = choose_device(config.trainer_common.device if config else "auto")
    dtype = compute_dtype(config.model.dtype if config else "auto", device)
    model = load_causal_lm(path, dtype).to(device)
    longest = config.rollout.max_model_len if config else getattr(model.config, "max_position_embeddings", 4096)
    engine = EmbeddedEngine(model, max_model_len=longest, max_num_seqs=8, tokenizer=codec.tokenizer)
    try:
        yield engine
    finally:
        engine.close()


def unlimited_calls(engine: LlmEngine, temperature: float, max_tokens: int) -> CallSettings:
    """Return the settings of calls that only the engine limits."""
    longest = engine.max_model_len
    return CallSettings(
        temperature=temperature,
        max_tokens=max_tokens,
        max_model_len=longest,
        max_prompt_length=longest,
        max_response_length=longest,
        max_calls=sys.maxsize,
    )


class _NoJudge(BaseJudge):
    """Gives every answer the same reward, because an episode without a reward has failed."""

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> tuple[float, bool]:
        return 0.0, True


class _Model:
    """The model, which sees the whole conversation."""

    def __init__(self, new_tuner: Callable[[], ModelTuner], system: str, console: Console) -> None:
        self._new_tuner = new_tuner
        self._console = console
        self._start: list[Message] = [{"role": "system", "content": system}] if system else []
        self._messages = list(self._start)
        self._tuner = new_tuner()

    def answer(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        answer = asyncio.run(self._tuner.chat(messages))
        self._messages = [*messages, answer.message]
        if answer.parsed.reasoning:
            self._print(answer.parsed.reasoning, "dim italic")
        self._print(answer.text, "")
        for call in answer.tool_calls:
            self._print(f"→ {call.name} {dict(call.arguments)}", "yellow")

    def forget(self) -> None:
        self._messages = list(self._start)
        self._tuner = self._new_tuner()

    def _print(self, text: str, style: str) -> None:
        self._console.print(Text(escape_control_characters(redact(text)), style=style), soft_wrap=True)
