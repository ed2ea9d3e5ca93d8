"""Measure the update of a workload's calls: one row per call, one row per timeline, every distinct prefix once.

The update maximises the logprob of every sampled token of the workload, on a random Qwen2-shaped model of 3.5 M
parameters, with the training code of the local backbone. Prints one line of JSON per workload: the CPU seconds of one
update in each mode (median; the modes alternate), and the norm of the difference between the gradients of each mode and
those of one row per call, relative to the norm of the latter.

    python bench/bench_update.py [--workload FILE.json] [--repeats 5] [--device cpu]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from workloads import BUILT_IN, VOCABULARY, Workload, calls_of, load

from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.policy import Policy
from astuner.config.model import ModelConfig
from astuner.config.trainer import PackMode
from astuner.context_tracker.audit import count_tokens
from astuner.context_tracker.merge import build_samples

# The forked workloads benchmark merging; with one row per call, an update of them takes minutes.
WORKLOADS = [name for name in BUILT_IN if not name.startswith("forked")]
MODES: tuple[PackMode, ...] = ("none", "leaf", "tree", "auto")
TOKEN_BUDGET = 16384


def save_model(folder: Path, vocabulary: int, longest: int, big: bool) -> None:
    """Write a random model to `folder`."""
    from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    positions = max(longest, 32768)
    if big:  # the shape of Qwen3-0.6B
        shape = Qwen3Config(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                            num_key_value_heads=8, head_dim=128, max_position_embeddings=positions,
                            tie_word_embeddings=True)  # fmt: skip
        Qwen3ForCausalLM(shape).save_pretrained(folder)
        return
    small = Qwen2Config(vocab_size=vocabulary, hidden_size=256, intermediate_size=768, num_hidden_layers=4,
                        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=positions,
                        tie_word_embeddings=True)  # fmt: skip
    Qwen2ForCausalLM(small).save_pretrained(folder)


class Update:
    """The gradient computation of a workload in one mode."""

    def __init__(self, policy: Policy, workload: Workload, mode: PackMode) -> None:
        self.policy = policy
        merge = "none" if mode == "none" else "leaf"
        samples = [sample for calls in calls_of(workload).values() for sample in build_samples(calls, merge)]
        self.rows = [TrainingRow.from_sample(sample, 0) for sample in samples]
        self.seconds: list[float] = []
        self.wall_seconds: list[float] = []

    def run(self) -> torch.Tensor:
        """Compute and return the gradient, and record the time taken."""
        model = self.policy.model
        model.zero_grad()
        _synchronize()
        start, start_wall = time.process_time(), time.perf_counter()
        for batch in self.policy.micro_batches(self.rows, TOKEN_BUDGET):
            with self.policy.autocast():
                logprobs, _ = token_logprobs(model, batch.token_ids, batch.train_counts, 1.0, batch.packing)
            (logprobs * batch.train_counts).sum().neg().backward()
        _synchronize()
        self.seconds.append(time.process_time() - start)
        self.wall_seconds.append(time.perf_counter() - start_wall)
        return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure(name: str, workload: Workload, policies: dict[PackMode, Policy], repeats: int) -> dict[str, Any]:
    """Time the update of a workload in every mode, and compare the gradients."""
    updates = {mode: Update(policies[mode], workload, mode) for mode in MODES}
    gradients = {mode: update.run() for mode, update in updates.items()}
    reference = gradients["none"]
    differences = {mode: float((gradients[mode] - reference).norm() / reference.norm()) for mode in MODES[1:]}
    for update in updates.values():
        update.seconds.clear()
        update.wall_seconds.clear()
    for _ in range(repeats):
        for update in updates.values():
            update.run()
    counts = count_tokens([call for calls in calls_of(workload).values() for call in calls])
    on_gpu = policies["none"].device.type == "cuda"
    times = {mode: statistics.median(u.wall_seconds if on_gpu else u.seconds) for mode, u in updates.items()}
    return {
        "workload": name,
        "raw_tokens": counts.raw,
        "distinct_tokens": counts.distinct,
        ("gpu_seconds" if on_gpu else "cpu_seconds"): times,
        "grad_rel_diff": differences,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--workload", type=Path, help="a JSON list of calls to use instead of the built-in workloads")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    workloads = {args.workload.stem: load(args.workload)} if args.workload else {n: BUILT_IN[n]() for n in WORKLOADS}
    ids = [token for workload in workloads.values() for call in workload for token in _ids(call)]
    longest = max(len(_ids(call)) for workload in workloads.values() for call in workload)
    on_gpu = args.device == "cuda"
    # With several threads, CPU seconds would include the time that threads wait for each other.
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), max(VOCABULARY, max(ids) + 1), longest, big=on_gpu)
        device = torch.device(args.device)
        policies = {mode: Policy(ModelConfig(), folder, device, mode) for mode in MODES}
        for name, workload in workloads.items():
            print(json.dumps(measure(name, workload, policies, args.repeats)), flush=True)


def _ids(call: dict[str, Any]) -> list[int]:
    ids: list[int] = call["prompt_ids"] + call["completion_ids"]
    return ids


if __name__ == "__main__":
    main()
