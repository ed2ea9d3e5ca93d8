"""Weights that turn token losses into the loss of a whole mini-batch, known before the first forward pass.

The loss is the sum over all rows and tokens of token loss × token weight. Since the weights are made for the
whole mini-batch up front, the gradients of its micro-batches, however cut, add up to the gradient of the loss.

With c the number of times that a token is trained (`Sample.loss_mask`), E the number of episodes that train
a token, and n_e the sum of c over all samples of episode e, the weight of a token of episode e is

    token-mean                c / sum over e of n_e             DAPO, arXiv:2503.14476, eq. 8 and 12
    seq-mean-token-mean       c / (E × n_e)                     GRPO, arXiv:2402.03300, eq. 3
    seq-mean-token-sum-norm   c / (E × max_response_length)     Dr. GRPO, arXiv:2503.20783, section 3.2

A sequence is an episode. No weight depends on how an episode's tokens are spread over samples. DAPO's formula
takes the token mean within each group and then the mean over groups; here, as in the authors' implementation,
it is one mean over the mini-batch.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from astuner.errors import BackboneError

LossAggMode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


def sample_scales(trained_tokens: Tensor, episode_index: Tensor, mode: LossAggMode, max_response_length: int) -> Tensor:
    """Return the factor that each sample's loss mask takes to become token weights.

    Args:
        trained_tokens: [B] integer or float, the sum of each sample's loss mask, for ALL samples of the
            mini-batch. The samples of an episode must be in the same mini-batch.
        episode_index: [B] int64, equal for the samples of one episode; any integers.
        mode: see the module's docstring.
        max_response_length: tokens; the divisor of `seq-mean-token-sum-norm`, not looked at otherwise.

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
            f"a mini-batch of {trained_tokens.numel()} samples trains no token, so its loss is undefined; "
            "leave such a mini-batch out"
        )
    if mode == "token-mean":
        scales = torch.full_like(tokens, 1 / float(tokens.sum()))
    elif mode == "seq-mean-token-mean":
        own = per_episode[episode]
        scales = torch.where(own > 0, 1 / (n_episodes * own), torch.zeros_like(own))
    else:
        scales = torch.full_like(tokens, 1 / (n_episodes * max_response_length))
    return scales.float()


def token_weights(loss_mask: Tensor, scales: Tensor) -> Tensor:
    """Return the weights of a micro-batch's tokens.

    Args:
        loss_mask: [B, T] integer or float: how often each token is trained, 0 for context and padding.
        scales: [B] float32, these rows' share of `sample_scales` of the whole mini-batch.

    Returns:
        [B, T] float32.
    """
    return loss_mask.float() * scales[:, None]
