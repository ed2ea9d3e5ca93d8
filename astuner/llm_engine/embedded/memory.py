"""How much memory the key/value cache may take."""

from __future__ import annotations

import psutil
import torch

from astuner.llm_engine.embedded.forward import KvShape

# Prefix cache, in tokens per request that may run at once, where the user names no number.
_PREFIX_TOKENS_PER_SEQ = 1024


def default_prefix_cache_tokens(shape: KvShape, max_num_seqs: int) -> int:
    """1024 tokens for each request that may run at once, but at most an eighth of the memory that is free."""
    return min(_PREFIX_TOKENS_PER_SEQ * max_num_seqs, _tokens_in(_free_bytes(shape.device) // 8, shape))


def default_lane_tokens(shape: KvShape, max_num_seqs: int, max_model_len: int) -> int:
    """As many as could ever be used (slabs hold up to four times the tokens in them), or half of what is free."""
    return min(4 * max_num_seqs * max_model_len, _tokens_in(_free_bytes(shape.device) // 2, shape))


def _tokens_in(num_bytes: int, shape: KvShape) -> int:
    return num_bytes // max(1, shape.bytes_per_token)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return psutil.virtual_memory().available
    free, _ = torch.accelerator.get_memory_info(device)
    return int(free)
