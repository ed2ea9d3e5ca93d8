"""Counts the activations that the backward pass of a model needs on a GPU, on fake tensors without memory."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

_ATTENTION = "astuner_counted"
# Tokens of the shortest of three forward passes.
_TOKENS = 32


class _FlashAttention(torch.autograd.Function):
    """Keeps for the backward pass what flash-attention keeps (arXiv:2307.08691); computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    output: Tensor = _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


def activation_bytes(model_path: str, dtype: torch.dtype, *, autocast: bool) -> float | None:
    """Return the bytes per token that the backward pass needs in a model without adapters, excluding the logits.

    Args:
        model_path: a folder with config.json, or a Hugging Face name.
        dtype: the dtype that the model computes in.
        autocast: whether the weights are in float32 and computations are cast, as on the local backbone; otherwise
            all weights have the dtype, as FSDP casts them.

    Returns:
        None for architectures that cannot run on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _attention)
    shape = AutoConfig.from_pretrained(model_path)
    shape._attn_implementation = _ATTENTION
    # Some architectures have operations that fake tensors lack, or their own attention, with errors of various types.
    with contextlib.suppress(Exception), FakeTensorMode():
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32 if autocast else dtype)
        cast = torch.autocast("cpu", dtype) if autocast and dtype != torch.float32 else contextlib.nullcontext()
        with cast:
            first, second, third = (_kept(model, number * _TOKENS) for number in (1, 2, 3))
        # The derivative at length 0 of a quadratic function, which leaves out copies of weights and masks.
        return (-5 * first + 8 * second - 3 * third) / (2 * _TOKENS)
    return None


def _kept(model: Any, tokens: int) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, without weights."""
    body = model.get_decoder()
    body.train()
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body(input_ids=torch.zeros((1, tokens), dtype=torch.int64), use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())
