"""Token weights, which turn token losses into the loss of a mini-batch.

The loss is the sum over all rows and tokens of token loss × token weight. The weights are computed for the whole
mini-batch before the first forward pass, so that the gradients of its micro-batches add up to the gradient of the loss,
no matter how it is split.

Let c be how often a token is trained (`Sample.train_counts`), E the number of episodes that train a token, and n_e the
sum of c over all samples in episode e. The weight of a token of episode e is

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
        trained_tokens: [B] integer or float, the sum of each sample's train counts, for ALL samples of the mini-batch.
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
            f"the loss of a mini-batch is undefined: none of its {trained_tokens.numel()} samples trains a token; "
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
