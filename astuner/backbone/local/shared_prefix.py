"""Computing the beginning that all rows of a micro-batch have in common once.

The rows of a micro-batch begin with the same system prompt and tools, often with the same task: the forward and
backward pass of those tokens need not be repeated for each row. The stock model runs over one sequence that holds the
common beginning and then what follows it in each row; all that is ours is the attention between them, which
transformers takes as a registered function. Outputs and gradients are those of separate rows but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "astuner_shared_prefix"
_MODEL_TYPES = ("llama", "qwen2", "qwen3")


def enable(model: Any) -> None:
    """Let a transformers model compute shared beginnings once, where it is one whose attention we know all of."""
    config = model.config
    windowed = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if config.model_type in _MODEL_TYPES and not windowed and config._attn_implementation == "sdpa":
        AttentionInterface.register(_NAME, _attend)
        AttentionMaskInterface.register(_NAME, sdpa_mask)
        model.set_attn_implementation(_NAME)


def common_prefix(model: Any, token_ids: Tensor) -> int:
    """Return how many first tokens to compute once for all rows; 0 where they share none, or it would not pay.

    The last token that the rows share is not among them: what comes after it is each row's own.

    Args:
        model: as given to `enable`.
        token_ids: [B, T].
    """
    if len(token_ids) == 1 or model.config._attn_implementation != _NAME:
        return 0
    differs = (token_ids != token_ids[0]).any(dim=0)
    shared = int(differs.int().argmax()) if bool(differs.any()) else token_ids.shape[1]
    prefix = max(shared - 1, 0)
    return prefix if _pays(model, prefix, token_ids.shape[1] - prefix) else 0


def _pays(model: Any, prefix: int, following: int) -> bool:
    """Whether computing P tokens less for a row saves more than the attention of the S tokens after them then costs.

    With a mask, that is S·(P + S) pairs of tokens; kernels for causal attention compute but half of (P + S)². A pair
    takes two products as wide as all heads, a token one with each weight.
    """
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    width = config.num_attention_heads * head
    weights = sum(parameter.numel() for parameter in model.parameters()) / config.num_hidden_layers
    return bool(prefix * weights > width * (following**2 - prefix**2))


def logits_of_shared(model: Any, token_ids: Tensor, prefix: int, first: int) -> tuple[Tensor, Tensor]:
    """Return what predicts the columns from `first` on, for rows whose first `prefix` tokens are the same.

    Args:
        model: as given to `enable`.
        token_ids: [B, T], T larger than `prefix`.
        prefix: P, at least 1.
        first: of 1 to T - 1.

    Returns:
        Logits [M, V], and [B, T - first]: which of the M predicts a place.
    """
    rows, length = token_ids.shape
    following = length - prefix
    positions = torch.arange(length, device=token_ids.device)
    # Where a token of row b at column t stands in the one sequence.
    own = prefix + following * torch.arange(rows, device=token_ids.device)[:, None] + positions[:following]
    places = torch.cat([positions[:prefix].expand(rows, -1), own], dim=1)
    wanted, index = torch.unique(places[:, first - 1 : -1], return_inverse=True)
    # A mask of four dimensions is handed on as it is: what each following token sees of its own row.
    mask = torch.ones(following, length, dtype=torch.bool, device=token_ids.device).tril(prefix)[None, None]
    output = model(
        input_ids=torch.cat([token_ids[0, :prefix], token_ids[:, prefix:].flatten()])[None],
        position_ids=torch.cat([positions[:prefix], positions[prefix:].repeat(rows)])[None],
        attention_mask=mask,
        logits_to_keep=wanted,
        use_cache=False,
        shared_prefix=prefix,
    )
    return output.logits[0], index


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    shared_prefix: int = 0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' "sdpa" does; [1, heads, P + B·S, width] where B rows of S share a prefix of P tokens."""
    sdpa: Callable[..., tuple[Tensor, None]] = sdpa_attention_forward
    if not shared_prefix:
        return sdpa(module, query, key, value, attention_mask, **kwargs)
    assert attention_mask is not None
    size = attention_mask.shape[-2]

    def rows(heads: Tensor) -> Tensor:
        own = heads[0, :, shared_prefix:]
        return own.view(len(own), -1, size, own.shape[-1]).transpose(0, 1)

    def whole(heads: Tensor) -> Tensor:
        own = rows(heads)
        return torch.cat([heads[:, :, :shared_prefix].expand(len(own), -1, -1, -1), own], dim=2)

    beginning = (heads[:, :, :shared_prefix] for heads in (query, key, value))
    before, _ = sdpa(module, *beginning, None, **kwargs)
    after, _ = sdpa(module, rows(query), whole(key), whole(value), attention_mask, **kwargs)
    return torch.cat([before, after.flatten(0, 1)[None]], dim=1), None
