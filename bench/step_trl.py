"""The TRL process of bench_step.py: `GRPOTrainer`, paused between steps."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from step_task import Gate, Sizes, messages, questions, reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class GateCallback(TrainerCallback):
    """Wait at the gate before each step and after the last one."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._gate.wait()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self._gate.wait()


class RewardFunction:
    """The reward function. It also counts the sampled tokens."""

    __name__ = "share_of_digits"

    def __init__(self) -> None:
        self.completion_tokens = 0
        self.first_at: float | None = None

    def __call__(
        self, completions: list[list[dict[str, str]]], completion_ids: list[list[int]], **_: Any
    ) -> list[float]:
        self.completion_tokens += sum(map(len, completion_ids))
        rewards = [reward(completion[0]["content"]) for completion in completions]
        self.first_at = self.first_at or time.time()
        return rewards


def arguments(folder: Path, sizes: Sizes) -> GRPOConfig:
    """Return the settings that match those of astuner's run. All completions of a step are sampled at once."""
    rows = sizes.prompts * sizes.group
    micro_batch = sizes.trl_micro_batch or rows
    return GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=rows // micro_batch,
        num_generations=sizes.group,
        max_completion_length=sizes.tokens,
        max_steps=sizes.steps,
        shuffle_dataset=False,
        learning_rate=sizes.learning_rate,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=0.0,
        loss_type="grpo",
        temperature=1.0,
        model_init_kwargs={"dtype": "float32"},
        bf16=sizes.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),  # else bf16 is refused on a CPU
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def main(folder: Path) -> None:
    sizes = Sizes.load(folder)
    gate = Gate()
    reward_function = RewardFunction()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward_function,
        args=arguments(folder, sizes),
        train_dataset=Dataset.from_list([{"prompt": messages(question)} for question in questions(sizes)]),
        callbacks=[GateCallback(gate)],
    )
    trainer.train()
    assert reward_function.first_at is not None
    gate.finish(
        reward_function.first_at,
        tokens=trainer.state.num_input_tokens_seen,
        completion_tokens=reward_function.completion_tokens,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
