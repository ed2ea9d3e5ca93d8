"""Compare the layouts of rows in verl's training engine: padded, packed, and with common prefixes computed once.

One update maximises the logprob of every sampled token of a workload, on a random Qwen2-shaped model, in verl's FSDP
engine without Ray and FSDP. `verl` are padded rows in verl's own micro-batches, which are limited without the padding;
`padded` are those limited with it; `leaf`, `tree` and `auto` are packed rows (`update.pack`). Prints one line of JSON
per workload: the tokens that each layout computes over the distinct prefixes, the CPU seconds of one update (median;
the layouts alternate), and the norm of the difference between the gradients of each layout and those of `verl`,
relative to the norm of the latter.

    ENVIRONMENT/bin/python bench/bench_rows.py [--repeats 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import verl.workers.engine.fsdp.transformer_impl as fsdp
from transformers import Qwen2Config, Qwen2ForCausalLM
from verl.workers.engine.utils import prepare_micro_batches
from verl.workers.utils.padding import no_padding_2_padding
from workloads import VOCABULARY, Agent, Workload, calls_of, group, retry, three_agents

from astuner.backbone.packing.row_bins import UpdateTokens
from astuner.backbone.verl.batch_layout import sample_fields
from astuner.config.trainer import PackMode
from astuner.context_tracker.merge import build_samples
from astuner.context_tracker.packing import encode_ids

# A package in the environments of the backbones is also called `tests`.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "backbone" / "verl"))
from in_process import InProcessTrainer, cpu_process_group

TOKEN_BUDGET = 4096
# The layouts by name: whether padding is removed, and `update.pack`.
LAYOUTS: dict[str, tuple[bool, PackMode]] = {
    "verl": (False, "leaf"),
    "padded": (False, "leaf"),
    "leaf": (True, "leaf"),
    "tree": (True, "tree"),
    "auto": (True, "auto"),
}


def lengths() -> Workload:
    """Return 16 episodes of different tasks, of 150 to 2,000 tokens, most of them short."""
    rng = random.Random(0)
    answers = [50] * 8 + [100, 100, 200, 200, 400, 400, 900, 1900]
    return [Agent("a", rng, 100, answer).call() | {"episode": f"e{number}"} for number, answer in enumerate(answers)]


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "lengths": lengths,
    "group": group,
    "retry": retry,
    "three_agents": three_agents,
}


def make_model() -> torch.nn.Module:
    torch.manual_seed(0)
    shape = Qwen2Config(vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=4096,
                        tie_word_embeddings=True, attn_implementation="sdpa")  # fmt: skip
    return Qwen2ForCausalLM(shape)


def negative_logprobs(model_output: dict[str, Any], data: Any, dp_group: object = None) -> tuple[torch.Tensor, Any]:
    """Return the loss: the sum of the negative log-probabilities of all sampled tokens."""
    mask = torch.nested.to_padded_tensor(data["loss_mask"], 0)
    return -(no_padding_2_padding(model_output["log_probs"], data) * mask).sum(), {}


class Update:
    """The update of a workload in one layout."""

    def __init__(self, name: str, workload: Workload) -> None:
        remove_padding, pack = LAYOUTS[name]
        self.model = make_model()
        self.trainer = InProcessTrainer(
            self.model, negative_logprobs, remove_padding=remove_padding, pack=pack, token_budget=TOKEN_BUDGET
        )
        self.is_verl = name == "verl"
        samples = [sample for calls in calls_of(workload).values() for sample in build_samples(calls, "leaf")]
        self.rows = [sample_fields(sample) for sample in samples]
        self.keys = [str(number) for number in range(len(samples))]
        self.trainer.put(self.keys, self.rows)
        self.seconds: list[float] = []
        self.computed = 0.0

    def run(self) -> torch.Tensor:
        """Compute and return the gradient, and record the CPU seconds."""
        self.model.zero_grad()
        own = fsdp.prepare_micro_batches
        fsdp.prepare_micro_batches = prepare_micro_batches if self.is_verl else own
        start = time.process_time()
        metrics = self.trainer.worker.compute(self.keys, list(self.rows[0]), negative_logprobs)["metrics"]
        fsdp.prepare_micro_batches = own
        self.seconds.append(time.process_time() - start)
        self.computed = sum(metrics["computed_tokens"])
        return torch.cat([parameter.grad.flatten() for parameter in self.model.parameters()])


def measure(name: str, workload: Workload, repeats: int) -> dict[str, Any]:
    """Time the update of a workload in every layout, and compare the gradients."""
    updates = {layout: Update(layout, workload) for layout in LAYOUTS}
    gradients = {layout: update.run() for layout, update in updates.items()}
    for update in updates.values():
        update.seconds.clear()
    for _ in range(repeats):
        for update in updates.values():
            update.run()
    tokens = UpdateTokens()
    tokens.add_rows([encode_ids(row["input_ids"].numpy()) for row in updates["verl"].rows])
    reference = gradients["verl"]
    return {
        "workload": name,
        "rows": len(updates["verl"].rows),
        "distinct_tokens": tokens.distinct,
        "computed_per_distinct": {layout: update.computed / tokens.distinct for layout, update in updates.items()},
        "cpu_seconds": {layout: statistics.median(update.seconds) for layout, update in updates.items()},
        "grad_rel_diff": {
            layout: float((gradient - reference).norm() / reference.norm()) for layout, gradient in gradients.items()
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    args = parser.parse_args()
    # With several threads, CPU seconds would include the time that threads wait for each other.
    torch.set_num_threads(1)
    with cpu_process_group():
        for name in args.workloads:
            print(json.dumps(measure(name, WORKLOADS[name](), args.repeats)), flush=True)


if __name__ == "__main__":
    main()
