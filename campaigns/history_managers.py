"""Tokens and success of the history managers on FrozenLake 8 x 8, as a table.

    python -m campaigns.history_managers [--episodes 50] [--player model|program]

The player is the model of `tutorial/example_frozenlake/prepare_model_8x8.py`, which is created on the first run. With
`--player program`, a program answers in place of a model: it thinks aloud, and one in ten of its moves is random. It
reads the last map of the prompt only, so it plays the same games with every history, and the table compares the tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from astuner.config.workflow import ContextTrackerConfig
from astuner.context_tracker.audit import certificate, count_tokens
from astuner.env_service import load_environment
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.schema import Episode, SamplingParams, Task, WorkflowTask
from astuner.task_runner.runner import TaskRunner
from astuner.workflows.agent_loop.workflow import EnvWorkflow, LoopSettings
from tests.scripted_engine import ScriptedEngine
from tests.workflows.agent_loop.conftest import LocalInstance
from tutorial.example_frozenlake import prepare_model_8x8
from tutorial.example_frozenlake.prepare_model import MOVES, best_moves
from tutorial.starting_model import build_tokenizer

TYPES = ("linear", "sliding_window", "linear_think", "auto_context")
ENVIRONMENT = "gymnasium/FrozenLake8x8-v1"
MAX_STEPS = prepare_model_8x8.MAX_MOVES
CONTEXT = prepare_model_8x8.RECIPE.context


@dataclass
class ThinkingPlayer:
    """Answers as a model that thinks aloud: best moves, one random move in ten, and a summary on request."""

    codec: ChatCodec
    rng: random.Random

    def answer(self, prompt_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """Return the ids of the answer to a prompt."""
        request = self.codec.decode(prompt_ids).rpartition("<|im_start|>user\n")[2].partition("<|im_end|>")[0]
        if "Summarize the steps" in request:
            text = "I know the map and walk towards the goal around the holes."
        else:
            move = self.rng.choice(list(MOVES) if self.rng.random() < 0.1 else best_moves(request))
            text = f"<think>\nThe goal is at the lower right. The way without holes goes {move}.\n</think>\n\n{move}"
        return self.codec.tokenizer.encode(f"{text}<|im_end|>", add_special_tokens=False)


def main() -> None:
    """Play the maps of the validation split with each history manager, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=50)
    parser.add_argument("--player", choices=("model", "program"), default="model")
    arguments = parser.parse_args()
    codec, engine_of = (_model if arguments.player == "model" else _program)()
    print("| history | success | LLM calls | tokens | distinct tokens | trained tokens | longest prompt | samples |")
    print("|---|---|---|---|---|---|---|---|")
    for kind in TYPES:
        print(row(kind, asyncio.run(play_all(kind, arguments.episodes, codec, engine_of))), flush=True)


def _model() -> tuple[ChatCodec, Callable[[int], LlmEngine]]:
    """Return the codec and the engine of the trained player, which plays all episodes."""
    from transformers import AutoModelForCausalLM

    folder = prepare_model_8x8.tiny_model()
    engine = EmbeddedEngine(AutoModelForCausalLM.from_pretrained(folder), max_model_len=CONTEXT)
    return ChatCodec(load_tokenizer(str(folder)), prepare_model_8x8.RECIPE.renderer), lambda number: engine


def _program() -> tuple[ChatCodec, Callable[[int], LlmEngine]]:
    """Return the codec, and a function that returns the engine of the episode of a number."""
    codec = ChatCodec(build_tokenizer(prepare_model_8x8.RECIPE, prepare_model_8x8.transcripts(50)), "default")
    return codec, lambda number: ScriptedEngine(ThinkingPlayer(codec, random.Random(number)).answer, CONTEXT)


async def play_all(
    kind: str, episodes: int, codec: ChatCodec, engine_of: Callable[[int], LlmEngine]
) -> Sequence[Episode]:
    """Return the episodes of the maps, which are played at the same time."""
    return await asyncio.gather(*(play(kind, number, codec, engine_of(number)) for number in range(episodes)))


async def play(kind: str, number: int, codec: ChatCodec, engine: LlmEngine) -> Episode:
    """Return the episode of a map."""
    history = {"context_tracker_type": kind, "max_env_len": 1000, "alien_llm_response_length": 128}
    settings = LoopSettings("text", ContextTrackerConfig.model_validate(history))
    runner = TaskRunner(lambda: EnvWorkflow(settings), None, engine, codec, max_samples=MAX_STEPS)
    instance = LocalInstance(load_environment(ENVIRONMENT, {"validation_tasks": 1, "seed": number}), split="validation")
    task = WorkflowTask(Task(str(number), ""), f"{kind}/{number}", seed=number, env=instance)
    lengths: dict[str, Any] = dict.fromkeys(("max_model_len", "max_prompt_length", "max_response_length"), CONTEXT)
    episode = await runner.run(task, runner.tuner(task, CallSettings(max_calls=MAX_STEPS, **lengths)))
    instance.environment.close()
    assert episode.status == "ok", episode.error
    assert certificate(episode.calls, episode.samples) == 1.0
    return episode


def row(kind: str, episodes: Sequence[Episode]) -> str:
    """Return a row of the table: means over the episodes."""
    tokens = [count_tokens(episode.calls) for episode in episodes]
    means = [
        sum(len(episode.calls) for episode in episodes),
        sum(count.raw for count in tokens),
        sum(count.distinct for count in tokens),
        sum(count.trained for count in tokens),
        sum(max(len(call.prompt_ids) for call in episode.calls) for episode in episodes),
        sum(len(episode.samples) for episode in episodes),
    ]
    success = sum(bool(episode.is_success) for episode in episodes) / len(episodes)
    return f"| `{kind}` | {success:.2f} | " + " | ".join(f"{total / len(episodes):,.0f}" for total in means) + " |"


if __name__ == "__main__":
    main()
