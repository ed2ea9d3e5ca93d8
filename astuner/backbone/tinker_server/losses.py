"""The losses that a client may name, as Tinker's documentation defines them (tinker-docs.thinkingmachines.ai/losses).

Each is a sum over tokens; how tokens and sequences are weighed against each other is the client's affair.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from astuner.backbone.tinker_server.refusal import Refusal

_Inputs = Mapping[str, Tensor]
_Options = Mapping[str, float]


@dataclass(frozen=True)
class Loss:
    """A loss.

    Attributes:
        inputs: what each datum must bring beside `target_tokens`, one number a token.
        optional: what it may bring; 1 a token where it does not.
        options: keys of `loss_fn_config`, with their defaults.
        compute: log-probabilities [M] of the targets, the inputs [M] and options, to the loss of each token [M].
    """

    inputs: tuple[str, ...]
    optional: tuple[str, ...]
    options: _Options
    compute: Callable[[Tensor, _Inputs, _Options], Tensor]


def _cross_entropy(logprobs: Tensor, inputs: _Inputs, _options: _Options) -> Tensor:
    return -logprobs * inputs["weights"]


def _ratio(logprobs: Tensor, inputs: _Inputs) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _importance_sampling(logprobs: Tensor, inputs: _Inputs, _options: _Options) -> Tensor:
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def _ppo(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """Clipped objective of Schulman et al. 2017 (arXiv:1707.06347), a token at a time."""
    ratio = _ratio(logprobs, inputs)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -torch.minimum(ratio * inputs["advantages"], clipped * inputs["advantages"])


def _cispo(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """The clipped ratio as a constant weight of the log-probability (arXiv:2506.13585)."""
    ratio = _ratio(logprobs.detach(), inputs)
    clipped = ratio.clamp(options["clip_low_threshold"], options["clip_high_threshold"])
    return -clipped * logprobs * inputs["advantages"]


def _dro(logprobs: Tensor, inputs: _Inputs, options: _Options) -> Tensor:
    """A quadratic penalty holds the policy near the sampler's (arXiv:2405.19107)."""
    penalty = 0.5 * options["beta"] * (logprobs - inputs["logprobs"]) ** 2
    return penalty - logprobs * inputs["advantages"]


_OF_A_SAMPLE = ("logprobs", "advantages")
_CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss((), ("weights",), {}, _cross_entropy),
    "importance_sampling": Loss(_OF_A_SAMPLE, (), {}, _importance_sampling),
    "ppo": Loss(_OF_A_SAMPLE, (), _CLIP, _ppo),
    "cispo": Loss(_OF_A_SAMPLE, (), _CLIP, _cispo),
    "dro": Loss(_OF_A_SAMPLE, (), {"beta": 0.05}, _dro),
}


def find_loss(name: str) -> Loss:
    """Return the loss of that name.

    Raises:
        Refusal: there is none.
    """
    if name not in LOSSES:
        raise Refusal(f"loss_fn {name!r} is unknown; there are: {', '.join(LOSSES)}")
    return LOSSES[name]


def options_of(name: str, given: Mapping[str, float] | None) -> _Options:
    """Return a loss's options: what was given over the defaults.

    Raises:
        Refusal: one is unknown.
    """
    options = find_loss(name).options
    unknown = sorted((given or {}).keys() - options.keys())
    if unknown:
        known = ", ".join(options) or "none"
        raise Refusal(f"loss_fn_config of {name} has {', '.join(map(repr, unknown))}; its options are: {known}")
    return {**options, **(given or {})}
