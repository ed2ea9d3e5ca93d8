"""Compare the rates of the matrix products of SmolLM2-135M: PyTorch's linear layers and astuner's, on a CPU.

The products of sampling have weights that the embedded engine packs once. Those of an update are computed by a linear
layer with gradients: the forward pass, the gradient of the input, and the gradient of the weights. Both sides take
turns, and the rates are medians of the rounds: operations per CPU second of the process, times the number of threads.
Repeated products find a small weight in the processor's cache, where the sampling of a model reads it from memory.

Prints one line of JSON: for each dtype and product, the GFLOPS (10^9 multiplications and additions per second) of
PyTorch and of astuner. bfloat16 is measured on processors that have instructions for it. Needs nothing but astuner.

    python bench/bench_linear.py [--threads 1] [--rounds 7]
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn import functional

from astuner.llm_engine.cpu_linear import linear, multiplies_bfloat16, pack, use_onednn

SAMPLING = {
    "1 token, 576 -> 3,072": (1, 576, 3072),
    "8 tokens, 576 -> 3,072": (8, 576, 3072),
    "64 tokens, 576 -> 3,072": (64, 576, 3072),
    "64 tokens, 576 -> 49,152 (head)": (64, 576, 49152),
    "2,048 tokens, 576 -> 3,072 (prompts)": (2048, 576, 3072),
}
"""Tokens, inputs and outputs of the products of sampling. 3,072 outputs are those of two matrices of an MLP."""
UPDATE = (2048, 576, 3072)
ROUND_OPERATIONS = 2e9
"""Operations of a measurement, at least."""

Product = tuple[float, Callable[[], object], Callable[[], object]]
"""The operations of a matrix product, and the product by PyTorch and by astuner."""


def sampling_product(dtype: torch.dtype, tokens: int, inputs: int, outputs: int) -> Product:
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    packed = pack(weight)
    return 2.0 * tokens * inputs * outputs, lambda: functional.linear(x, weight), lambda: linear(x, packed)


def update_products(dtype: torch.dtype) -> dict[str, Product]:
    tokens, inputs, outputs = UPDATE
    weight, x = torch.randn(outputs, inputs).to(dtype) * 0.04, torch.randn(tokens, inputs).to(dtype)
    gradient = torch.randn(tokens, outputs).to(dtype)

    def layer(is_astuner: bool) -> nn.Linear:
        made = nn.Linear(inputs, outputs, bias=False, dtype=dtype)
        made.weight.data.copy_(weight)
        if is_astuner:
            use_onednn(nn.Sequential(made))
        return made

    def forward(is_astuner: bool) -> Callable[[], object]:
        made = layer(is_astuner)
        return lambda: made(x)

    def backward(is_astuner: bool, of_weight: bool) -> Callable[[], object]:
        """Return one gradient. The other input has none, because astuner's layer computes all that are needed."""
        made, given = layer(is_astuner), x.detach().requires_grad_(not of_weight)
        made.weight.requires_grad_(of_weight)
        output: Tensor = made(given)
        wanted = made.weight if of_weight else given
        return lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True)

    operations = 2.0 * tokens * inputs * outputs
    return {
        "update, 2,048 tokens: forward": (operations, forward(False), forward(True)),
        "update, 2,048 tokens: gradient of the input": (operations, backward(False, False), backward(True, False)),
        "update, 2,048 tokens: gradient of the weights": (operations, backward(False, True), backward(True, True)),
    }


def rate(operations: float, product: Callable[[], object]) -> float:
    """Return the GFLOPS of one measurement."""
    repeats = max(1, round(ROUND_OPERATIONS / operations))
    start = time.process_time()
    for _ in range(repeats):
        product()
    return operations * repeats / (time.process_time() - start) / 1e9


def measure(products: dict[str, Product], rounds: int, threads: int) -> dict[str, dict[str, float]]:
    """Return the median rates of PyTorch and of astuner, on all threads together, by product."""
    rates: dict[str, dict[str, list[float]]] = {name: {"pytorch": [], "astuner": []} for name in products}
    for _ in range(rounds + 1):
        for name, (operations, pytorch, astuner) in products.items():
            rates[name]["pytorch"].append(threads * rate(operations, pytorch))
            rates[name]["astuner"].append(threads * rate(operations, astuner))
    # The first round warms up.
    return {
        name: {side: round(median(values[1:]), 1) for side, values in sides.items()} for name, sides in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--threads", type=int, default=1, help="threads of a product; the rates are those of all of them"
    )
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    result = {}
    for dtype in (torch.float32, torch.bfloat16) if multiplies_bfloat16() else (torch.float32,):
        products = {name: sampling_product(dtype, *shape) for name, shape in SAMPLING.items()}
        products |= update_products(dtype)
        result[str(dtype).removeprefix("torch.")] = measure(products, arguments.rounds, arguments.threads)
    print(json.dumps({"threads": arguments.threads, "gflops": result}))


if __name__ == "__main__":
    main()
