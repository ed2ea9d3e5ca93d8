"""What both sides of bench_step.py share: model, prompts, reward, sizes, and the gate between steps.

Nothing heavy is imported here, so that each side pays for its own imports only.
"""

from __future__ import annotations

import itertools
import json
import os
import string
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# About 100 tokens, as the tokenizer never saw it: like an agent's, prompts begin alike and are longer than answers.
SYSTEM = "You add numbers for people in a hurry. Say the sum alone, in digits, and nothing else before or after."
LEARNING_RATE = 1e-4
VOCABULARY = 1024


@dataclass(frozen=True)
class Sizes:
    """How much is done.

    Attributes:
        prompts: tasks a step.
        group: completions a task.
        tokens: of every completion, exactly.
        steps: training steps.
    """

    prompts: int
    group: int
    tokens: int
    steps: int

    def save(self, folder: Path) -> None:
        (folder / "sizes.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> Sizes:
        return Sizes(**json.loads((folder / "sizes.json").read_text()))


def questions(sizes: Sizes) -> list[str]:
    """Return the questions of the whole run, in order; their prompts are equally long."""
    return [f"What is {10 + index % 90} + {10 + index // 90}?" for index in range(sizes.prompts * sizes.steps)]


def messages(question: str) -> list[dict[str, str]]:
    """Return the prompt of a question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


class FirstReward:
    """When the first reward of this process was computed, seconds since the epoch."""

    at: float | None = None


def reward(text: str) -> float:
    """Return the share of digits: it varies within every group of a random model, and can be learned."""
    share = sum(char.isdigit() for char in text) / max(len(text), 1)
    if FirstReward.at is None:
        FirstReward.at = time.time()
    return share


class Gate:
    """Lets the parent decide when a step begins: a line on stdin opens it, a line on stdout says that it is reached.

    Whatever else this process prints goes to stderr.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def wait(self) -> None:
        """Say that no step is running, and wait until one may begin."""
        print("ready", file=self._out)
        if not sys.stdin.readline():
            sys.exit("bench_step.py has ended")

    def finish(self, **result: Any) -> None:
        """Say that the last step is done, and leave the results."""
        print(json.dumps({"first_reward_at": FirstReward.at, **result}), file=self._out)


def prepare(folder: Path, sizes: Sizes) -> None:
    """Write model, tokenizer and sizes.

    The tokenizer's end token lies outside the model's vocabulary, so that every completion has its full length.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tutorial.example_math_agent.tiny_tokenizer import build_tokenizer

    rows = [{"messages": messages(question)[1:], "tools": None} for question in questions(sizes)]
    tokenizer = build_tokenizer(rows, context=1024)
    fillers = map("".join, itertools.product(string.ascii_uppercase, repeat=3))
    tokenizer.add_tokens(list(itertools.islice(fillers, VOCABULARY - len(tokenizer))))
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    assert tokenizer.eos_token_id == VOCABULARY
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        initializer_range=0.06,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    sizes.save(folder)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]), Sizes(*map(int, sys.argv[2:])))
