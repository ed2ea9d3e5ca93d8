"""The loss of supervised fine-tuning: cross entropy on transcripts."""

from __future__ import annotations

import torch
from torch import Tensor


def sft_token_weights(train_counts: Tensor, attention_mask: Tensor, prompt_loss_weight: float) -> Tensor:
    """Return a weight for each token in a transcript, which replaces the sample's train counts.

    The assistant's tokens have their train count as weight, all others have `prompt_loss_weight` (Huerta-Enochian and
    Ko, "Instruction fine-tuning: does prompt loss matter?", arXiv:2401.13586). The first token of a row has weight 0,
    because nothing precedes it to predict it from.

    Args:
        train_counts: [B, T] int64, 0 for tokens that the assistant did not write.
        attention_mask: [B, T] bool or integer, 0 for padding (on either side).
        prompt_loss_weight: at least 0.

    Returns:
        [B, T] float32. Its row sums are the `trained_tokens` of `sample_scales`; it is the `train_counts` of
        `token_weights`.
    """
    present = attention_mask.bool()
    predicted = present & (present.long().cumsum(dim=1) > 1)
    weight = torch.where(train_counts > 0, train_counts.float(), prompt_loss_weight)
    return torch.where(predicted, weight, torch.zeros_like(weight))


def cross_entropy_losses(logprobs: Tensor, weights: Tensor) -> Tensor:
    """Return the cross entropy of each token, -log π(token | preceding tokens).

    Args:
        logprobs: [B, T] float; `logprobs[b, t]` is the log-probability of token t given the tokens before it.
        weights: [B, T] float, from `sft_token_weights`.

    Returns:
        [B, T] in the dtype of `logprobs`, 0 where the weight is 0. With `token-mean`, the sum of losses × token weights
        is the weighted mean of `torch.nn.functional.cross_entropy`.
    """
    return torch.where(weights > 0, -logprobs, torch.zeros_like(logprobs))
