"""Supervised fine-tuning: cross entropy on transcripts."""

from __future__ import annotations

import torch
from torch import Tensor


def sft_token_mask(loss_mask: Tensor, attention_mask: Tensor, prompt_loss_weight: float) -> Tensor:
    """Return how much each token of a transcript counts, in the place of a sample's loss mask.

    The assistant's own tokens weigh as often as they are trained, all others `prompt_loss_weight`
    (Huerta-Enochian and Ko, "Instruction fine-tuning: does prompt loss matter?", arXiv:2401.13586).
    The first token of a row is predicted from nothing and never counts.

    Args:
        loss_mask: [B, T] int64, 0 for what the assistant did not write.
        attention_mask: [B, T] bool or integer, 0 for padding (on either side).
        prompt_loss_weight: at least 0.

    Returns:
        [B, T] float32. Its row sums are the `trained_tokens` of `sample_scales`, and it is the `loss_mask`
        of `token_weights`.
    """
    present = attention_mask.bool()
    predicted = present & (present.long().cumsum(dim=1) > 1)
    weight = torch.where(loss_mask > 0, loss_mask.float(), prompt_loss_weight)
    return torch.where(predicted, weight, torch.zeros_like(weight))


def cross_entropy_losses(logprobs: Tensor, token_mask: Tensor) -> Tensor:
    """Return each token's cross entropy, -log π(token | what precedes it).

    Args:
        logprobs: [B, T] float: `logprobs[b, t]` is of token t given the tokens before it.
        token_mask: [B, T] float, of `sft_token_mask`.

    Returns:
        [B, T] in the dtype of `logprobs`, 0 where the mask is 0. With `token-mean` weights their weighted
        sum is the weighted mean of `torch.nn.functional.cross_entropy`.
    """
    return torch.where(token_mask > 0, -logprobs, torch.zeros_like(logprobs))
