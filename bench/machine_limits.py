"""The limits of a machine for a model, and the shares of them that the embedded engine and a training step reach."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from astuner.context_tracker.packing import count_distinct_prefixes, encode_ids
from astuner.llm_engine.cpu_linear import linear, pack


def measure_limits(dtypes: list[str]) -> dict[str, Any]:
    """Return the rates of matrix products in GFLOPS, and the bandwidth of reading memory in GB/s."""

    def best(run: Any, repeats: int = 8) -> float:
        run()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    size, gflops = 2048, {}
    with torch.inference_mode():
        for dtype in dtypes:
            a, b = torch.randn(2, size, size).to(getattr(torch, dtype)).unbind()
            packed = pack(b)
            products = (lambda: a @ b, lambda: linear(a, packed))  # noqa: B023
            gflops[dtype] = round(2 * size**3 / min(map(best, products)) / 1e9)
        block = torch.ones(2**27)
        bandwidth = block.nbytes / best(block.sum) / 1e9
    return {"gemm_gflops": gflops, "read_gb_per_second": round(bandwidth, 1), "threads": torch.get_num_threads()}


@dataclass(frozen=True)
class Workload:
    """What is sampled, and trained in a step.

    Attributes:
        prompts: the token ids of the prompts.
        group: number of answers of a prompt in a step.
        tokens: number of sampled tokens of an answer.
    """

    prompts: list[list[int]]
    group: int
    tokens: int


@dataclass(frozen=True)
class Operations:
    """Floating-point operations of a model, without those of attention.

    Attributes:
        per_token: of the layers, for a token that the model reads.
        per_logits: of the head, for a token that the model predicts.
    """

    per_token: int
    per_logits: int

    @staticmethod
    def of(model: Path) -> Operations:
        """Count two operations per weight of a matrix."""
        shapes: dict[str, list[int]] = {}
        for file in model.glob("*.safetensors"):
            with safe_open(file, "pt") as weights:
                shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        sizes = {name: shape[0] * shape[1] for name, shape in shapes.items() if len(shape) == 2}
        head = sizes["model.embed_tokens.weight"]
        return Operations(2 * sum(size for name, size in sizes.items() if ".layers." in name), 2 * head)

    def of_token(self, workload: Workload) -> float:
        """Return the operations per sampled token, including its share of those of the prompt.

        The model never reads the last sampled token.
        """
        length = statistics.mean(map(len, workload.prompts)) + workload.tokens - 1
        return self.per_token * length / workload.tokens + self.per_logits

    def of_step(self, workload: Workload) -> float:
        """Return the operations of a step, which computes each distinct prefix of the prompts once per phase.

        The phases are sampling and the update. A forward and a backward pass have three times the operations of a
        forward pass.
        """
        sampled = len(workload.prompts) * workload.group * workload.tokens
        shared = count_distinct_prefixes([encode_ids(prompt) for prompt in workload.prompts])
        return 4.0 * (self.per_token * (shared + sampled) + self.per_logits * sampled)

    def read_bytes(self, dtype: str) -> int:
        """Return the bytes of the weights that a forward pass of one token reads."""
        return (self.per_token + self.per_logits) // 2 * getattr(torch, dtype).itemsize


def gemm_shares(rates: dict[str, float], operations: float, limits: dict[str, Any]) -> dict[str, float]:
    """Return the shares of the rate of matrix products, by dtype.

    Args:
        rates: tokens or steps per second, by dtype.
        operations: floating-point operations of a token or step.
        limits: the result of `measure_limits`.
    """
    return {dtype: _rounded(rate * operations / (limits["gemm_gflops"][dtype] * 1e9)) for dtype, rate in rates.items()}


def bandwidth_shares(rates: dict[str, float], operations: Operations, limits: dict[str, Any]) -> dict[str, float]:
    """Return the shares of the bandwidth of memory with which the weights are read, by dtype.

    Args:
        rates: tokens per second of a single request, by dtype. The time includes the prompt; the count of tokens does
            not.
        operations: those of the model.
        limits: the result of `measure_limits`.
    """
    bandwidth = limits["read_gb_per_second"] * 1e9
    return {dtype: _rounded(rate * operations.read_bytes(dtype) / bandwidth) for dtype, rate in rates.items()}


def _rounded(share: float) -> float:
    return float(f"{share:.3g}")
