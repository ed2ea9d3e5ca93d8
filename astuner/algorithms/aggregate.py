"""Token weights, which turn token losses into a mini-batch's loss, and the loss of supervised fine-tuning.

The loss is the sum over all rows and tokens of token loss × token weight. The weights are computed for the whole
mini-batch before the first forward pass, so that its micro-batches' gradients add up to the gradient of the loss, no
matter how it is split.

Let c be how often a token is trained (`Sample.train_counts`), E the number of episodes that train a token, and n_e the
total c in episode e over all its samples. Each token in episode e has the weight

    token-mean                c / sum over e of n_e             DAPO, arXiv:2503.14476, eq. 8 and 12
    seq-mean-token-mean       c / (E × n_e)                     GRPO, arXiv:2402.03300, eq. 3
    seq-mean-token-sum-norm   c / (E × max_response_length)     Dr. GRPO, arXiv:2503.20783, section 3.2

A sequence is an episode. The weights do not depend on how the tokens of an episode are distributed over samples. DAPO's
formula is the mean over groups of the token mean within each group; here, as in the authors' implementation, it is one
mean over the mini-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from astuner.config.algorithms import LossAggMode
from astuner.errors import BackboneError


def sample_scales(trained_tokens: Tensor, episode_index: Tensor, mode: LossAggMode, max_response_length: int) -> Tensor:
    """Return the factors that turn the train counts of each sample into token weights.

    Args:
        trained_tokens: [B] integer or float, the sum of each sample's train counts, for ALL samples in the mini-batch.
            All samples of an episode must be in the same mini-batch.
        episode_index: [B] int64, equal for the samples of one episode; arbitrary integers.
        mode: see the module's docstring.
        max_response_length: tokens; the divisor of `seq-mean-token-sum-norm`, ignored otherwise.

    Returns:
        [B] float32.

    Raises:
        BackboneError: no token of the mini-batch is trained.
    """
    tokens = trained_tokens.double()
    _, episode = torch.unique(episode_index, return_inverse=True)
    per_episode = tokens.new_zeros(episode_index.numel()).index_add(0, episode, tokens)
    n_episodes = int((per_episode > 0).sum())
    if n_episodes == 0:
        raise BackboneError(
            f"a mini-batch's loss is undefined: none of its {trained_tokens.numel()} samples trains a token; "
            "leave out such mini-batches"
        )
    if mode == "token-mean":
        scales = torch.full_like(tokens, 1 / float(tokens.sum()))
    elif mode == "seq-mean-token-mean":
        n_e = per_episode[episode]
        scales = torch.where(n_e > 0, 1 / (n_episodes * n_e), torch.zeros_like(n_e))
    else:
        scales = torch.full_like(tokens, 1 / (n_episodes * max_response_length))
    return scales.float()


def token_weights(train_counts: Tensor, scales: Tensor) -> Tensor:
    """Return token weights for a micro-batch.

    Args:
        train_counts: [B, T] integer or float, how often each token is trained; 0 for context and padding.
        scales: [B] float32, the entries of the mini-batch's `sample_scales` for these rows.

    Returns:
        [B, T] float32.
    """
    return train_counts.float() * scales[:, None]


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
        [B, T] float32. Pass its row sums to `sample_scales` as `trained_tokens`, and itself to `token_weights` as
        `train_counts`.
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
        [B, T] in the dtype of `logprobs`, 0 where the weight is 0. With `token-mean`, losses × token weights sum to the
        weighted mean of `torch.nn.functional.cross_entropy`.
    """
    return torch.where(weights > 0, -logprobs, torch.zeros_like(logprobs))
