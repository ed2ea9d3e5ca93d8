"""The model, prompts, reward, sizes and gate that the processes of bench_step.py and bench_real_model.py share.

This module imports nothing heavy, so that each process pays only for its own imports.
"""

from __future__ import annotations

import itertools
import json
import os
import string
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# About 100 tokens, because the tokenizer was not trained on it. As with agents, prompts share a prefix and are longer
# than answers.
SYSTEM = "You add numbers for people in a hurry. Say the sum alone, in digits, and nothing else before or after."
VOCABULARY = 1024


@dataclass(frozen=True)
class Sizes:
    """Workload of the benchmark.

    Attributes:
        prompts: Tasks per step.
        group: Completions per task.
        tokens: Exact length of every completion, in tokens.
        steps: Training steps.
        dtype: Dtype that both frameworks compute in; the trained weights are float32.
        learning_rate: Constant learning rate.
        trl_micro_batch: Rows that TRL computes at once; None is all rows of a step. astuner chooses its micro-batches.
    """

    prompts: int
    group: int
    tokens: int
    steps: int
    dtype: str = "float32"
    learning_rate: float = 1e-4
    trl_micro_batch: int | None = None

    def save(self, folder: Path) -> None:
        (folder / "sizes.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def load(folder: Path) -> Sizes:
        return Sizes(**json.loads((folder / "sizes.json").read_text()))


def questions(sizes: Sizes) -> list[str]:
    """Return the questions of the run, in order. Their prompts have the same length."""
    return [f"What is {10 + index % 90} + {10 + index // 90}?" for index in range(sizes.prompts * sizes.steps)]


def messages(question: str) -> list[dict[str, str]]:
    """Return the prompt of a question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def reward(text: str) -> float:
    """Return the share of digits in `text`, which varies within every group of a random model and can be learned."""
    return sum(char.isdigit() for char in text) / max(len(text), 1)


class Gate:
    """Lets the parent process decide when a step begins.

    The process writes a line to stdout when it reaches the gate and waits for a line on stdin. All other output of the
    process goes to stderr.
    """

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def wait(self) -> None:
        """Report that no step is running, and wait until the next one may begin."""
        print("ready", file=self._out)
        if not sys.stdin.readline():
            sys.exit("the benchmark has ended")

    def finish(self, first_reward_at: float, **result: Any) -> None:
        """Report that the last step is done, and print the results.

        Args:
            first_reward_at: when the first reward was computed, in seconds since the epoch.
            result: further results.
        """
        print(json.dumps({"first_reward_at": first_reward_at, **result}), file=self._out)


def prepare(folder: Path, sizes: Sizes) -> None:
    """Write the model, the tokenizer and the sizes to `folder`.

    The end-of-sequence token is outside the model's vocabulary, so that every completion has its full length.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tutorial.tiny_tokenizer import build_tokenizer

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
