"""What to do about the ways in which vLLM fails to start, by what it prints."""

from __future__ import annotations

import re

_KNOWN = (
    (r"Free memory on device|gpu memory utilization", "lower rollout.gpu_memory_utilization, or free the GPU"),
    (
        r"No available memory for the cache blocks|KV cache.*(larger than|needed)",
        "lower rollout.max_model_len, or raise rollout.gpu_memory_utilization",
    ),
    (r"out of memory|DefaultCPUAllocator", "free memory, use a smaller model, or lower rollout.max_num_seqs"),
    (r"max_model_len \(\d+\) is greater", "lower rollout.max_model_len to what the model has positions for"),
    (r"must be divisible by tensor parallel size", "set debug.debug_tensor_parallel_size to a divisor"),
    (r"address already in use", "choose another debug.debug_vllm_port"),
    (r"Model architectures .* are not supported", "this vLLM does not know the model: use rollout.name: embedded"),
)


def advice_for(printed: str) -> str:
    """Say what to do about a server that failed and has printed this."""
    for pattern, advice in _KNOWN:
        if re.search(pattern, printed, re.IGNORECASE):
            return advice
    return "look at its log, mend what it says, or sample in this process with rollout.name: embedded"
