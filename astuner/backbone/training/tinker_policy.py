"""Definitions that `astuner serve-tinker` shares with its clients and with the estimate of its memory.

`TinkerPolicy` is the extension of Tinker's wire format: settings that have fixed values in Tinker. `batch_tokens`
returns the size of a forward pass.
"""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

from astuner.config.root import AstunerConfig

POLICY_HEADER = "Astuner-Policy"
"""The HTTP header with a `TinkerPolicy` as JSON. It applies to the client session that the request creates."""
POLICY_EXTENSION = "astuner-policy"
"""A server that reads the header lists this name under `extensions` in its capabilities."""
ALL_LINEAR = "all-linear"
_MAX_BATCH_TOKENS = 8192
# The logits use most of the memory: at most 1 GiB per batch in float32.
_MAX_BATCH_LOGITS = 2**28


def batch_tokens(vocab_size: int) -> int:
    """Return the maximum number of tokens, with padding, in a server's forward pass over several rows."""
    return min(_MAX_BATCH_TOKENS, max(1, _MAX_BATCH_LOGITS // vocab_size))


class TinkerPolicy(BaseModel):
    """Settings for the models of a client session. The defaults are Tinker's fixed values."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    temperature: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """Divides the logits in training and for log-probabilities of prompts."""
    lora_alpha: Annotated[int, Field(gt=0)] = 32
    """The output of adapters is multiplied by lora_alpha / rank ("LoRA Without Regret", Schulman et al. 2025)."""
    lora_target_modules: str | list[str] = ALL_LINEAR
    """Modules with adapters, as in PEFT; `all-linear` leaves the choice to train_attn, train_mlp and train_unembed."""

    @classmethod
    def from_config(cls, config: AstunerConfig) -> Self:
        """Return the policy of a run."""
        lora = config.model.lora
        # Greedy sampling does not scale the logits.
        temperature = config.rollout.temperature or 1.0
        if not lora.rank:
            return cls(temperature=temperature)
        return cls(temperature=temperature, lora_alpha=lora.alpha, lora_target_modules=lora.target_modules)
