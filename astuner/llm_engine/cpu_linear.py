"""Linear layers on a CPU through oneDNN's matrix product, in sampling and in training.

PyTorch multiplies float32 matrices with MKL. On one AMD EPYC (Zen 5) core, with the shapes of a model with 135 M
weights, oneDNN reaches 165 to 235 GFLOPS for 8 rows or more, MKL reaches 30 to 105. Both accumulate in float32. On two
cores of an AMD EPYC without AVX512, MKL is faster, in updates by a quarter, except for packed weights and few rows. In
bfloat16, PyTorch uses oneDNN itself, but reorders the weights in each call.
"""

from __future__ import annotations

import ctypes
import platform
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from astuner.llm_engine.weight_digests import block_sums

# With smaller weights, the overhead of calling oneDNN is larger than its gain.
_MIN_ELEMENTS = 150_000
# Packing depends on the expected number of rows in the other factor. This one is within a tenth of the best for 1 to
# 1,024 rows.
_PACKED_ROWS = 64


@cache
def _is_available(dtype: torch.dtype) -> bool:
    """Return whether oneDNN can multiply matrices of a dtype on this processor."""
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


@cache
def multiplies_bfloat16() -> bool:
    """Return whether this processor has instructions for bfloat16 products (AVX512-BF16, AMX, or Arm's).

    Without them, a product in bfloat16 takes 6 to 80 times as long as in float32.
    """
    if _is_x86():
        return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())
    return _is_available(torch.bfloat16)


def is_packed(elements: int, dtype: torch.dtype) -> bool:
    """Return whether `pack` copies a weight on a CPU with this number of elements."""
    return elements >= _MIN_ELEMENTS and _is_available(dtype)


def pack(weight: Tensor) -> Tensor:
    """Return a copy of a weight in oneDNN's layout, for `linear`, or `weight` if it is small or not on a CPU.

    Args:
        weight: [outputs, inputs].
    """
    if weight.device.type != "cpu" or not is_packed(weight.numel(), weight.dtype):
        return weight
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS)
    return packed


def unpack(weight: Tensor) -> Tensor:
    """Return a weight that `pack` returned with the layout and the bits that it had before."""
    return weight.to_dense() if weight.is_mkldnn else weight


def packed_memory(weight: Tensor) -> Tensor | None:
    """Return the memory of a weight that `pack` returned, without a copy, for `weight_digests`.

    Args:
        weight: [rows, columns]. It must outlive the result.

    Returns:
        [rows, columns or more]. Each block of 64 rows has the values in the weight's same rows, in another order, and
        zeros. None if oneDNN's layout on this processor has no such blocks.
    """
    operations = ("data_ptr", "_nbytes", "_get_mkldnn_serialized_md")
    if not all(hasattr(torch.ops.mkldnn, name) for name in operations):
        return None
    rows, columns = weight.shape
    return _memory(weight) if _keeps_blocks(rows, columns, weight.dtype, _layout(weight)) else None


@cache
def _keeps_blocks(rows: int, columns: int, dtype: torch.dtype, layout: bytes) -> bool:
    """Return whether a layout keeps the values in each block of 64 rows together, from a packed example."""
    # A prime period, so that blocks differ.
    example = torch.arange(rows * columns, dtype=torch.int32).remainder_(8191).to(dtype).view(rows, columns)
    packed = pack(example)  # must outlive its memory
    memory = _memory(packed)
    # oneDNN may choose another layout with another number of threads.
    return memory is not None and _layout(packed) == layout and torch.equal(block_sums(memory), block_sums(example))


def _layout(packed: Tensor) -> bytes:
    return bytes(torch.ops.mkldnn._get_mkldnn_serialized_md(packed).numpy())


def _memory(packed: Tensor) -> Tensor | None:
    size = torch.ops.mkldnn._nbytes(packed)
    if size % (len(packed) * packed.element_size()):
        return None
    content = (ctypes.c_char * size).from_address(torch.ops.mkldnn.data_ptr(packed))
    return torch.frombuffer(content, dtype=packed.dtype).view(len(packed), -1)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x @ weight.T + bias`, without gradient.

    Args:
        x: [..., inputs].
        weight: [outputs, inputs], packed or not.
        bias: [outputs].
    """
    if weight.is_mkldnn or (weight.dtype == torch.float32 and _is_faster(x, weight)):
        return _product(x, weight, bias)
    return functional.linear(x, weight, bias)


class OneDnnLinear(nn.Linear):
    """A linear layer that oneDNN computes in float32 where it is faster, forward and backward. See `use_onednn`."""

    def forward(self, x: Tensor) -> Tensor:
        """Return `x @ weight.T + bias`."""
        is_float32 = x.dtype == self.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        if not is_float32 or not _is_faster(x, self.weight):
            return super().forward(x)
        product: Tensor = _Linear.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return product


def use_onednn(model: nn.Module) -> None:
    """Make the linear layers of a model on a CPU `OneDnnLinear`s, in place. Their parameters stay the same objects."""
    for module in model.modules():
        if type(module) is nn.Linear:
            module.__class__ = OneDnnLinear


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _product(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            _product(grad, weight.t(), None) if for_x else None,
            _product(rows.t(), x.flatten(0, -2).t(), None) if for_weight else None,
            rows.sum(0) if for_bias else None,
        )


@cache
def _has_fast_products() -> bool:
    """Return whether oneDNN multiplies float32 matrices that are not packed faster than PyTorch itself does.

    On x86 without AVX512, MKL is faster.
    """
    return not _is_x86() or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def _is_x86() -> bool:
    return platform.machine().lower() in ("x86_64", "amd64")


def _is_faster(x: Tensor, weight: Tensor) -> bool:
    return (
        _has_fast_products()
        and weight.device.type == "cpu"
        and x.dim() > 1
        and x.numel() > 0
        and is_packed(weight.numel(), weight.dtype)
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return product
