"""Samples one token per row of logits. Each row has its own sampling parameters and random stream."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from astuner.llm_engine.embedded.request import Request, SampledToken, TopLogprobs

# Constants of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014).
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
# With 40 bits, u × total is below total in float64 for any rounding, so that the draw is in range.
_UNIFORM_BITS = 40


def uniforms(keys: NDArray[np.uint64], counters: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return number `counters[i]` of the SplitMix64 stream with seed `keys[i]`, in [0, 1).

    A number depends only on its key and counter, not on the rest of the batch.
    """
    z = keys + (counters + np.uint64(1)) * _GAMMA
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    z ^= z >> np.uint64(31)
    drawn: NDArray[np.float64] = (z >> np.uint64(64 - _UNIFORM_BITS)) * 2.0**-_UNIFORM_BITS
    return drawn


class BatchSampler:
    """Samples one token per call for each request in a fixed list.

    Uses inverse-CDF sampling; on a CPU, it takes a third of the time that `torch.multinomial`'s exponential trick
    takes.
    """

    def __init__(self, requests: Sequence[Request], device: torch.device) -> None:
        temperatures = [request.params.temperature for request in requests]
        scales = [t or 1.0 for t in temperatures]
        self._device = device
        self._keys = np.array([request.key for request in requests], dtype=np.uint64)
        self._counters = np.array([len(request.logprobs) for request in requests], dtype=np.uint64)
        self._scale: Tensor | float | None
        if any(scale != scales[0] for scale in scales):
            self._scale = torch.tensor(scales, device=device)[:, None]
        else:
            self._scale = scales[0] if scales[0] != 1.0 else None
        self._greedy = _rows([t == 0 for t in temperatures], device)
        self._truncated = _rows([_is_truncated(request) for request in requests], device)
        if self._truncated is not None:
            params = [request.params for request in requests if _is_truncated(request)]
            self._top_k = torch.tensor([[p.top_k] for p in params], device=device)
            self._top_p = torch.tensor([[p.top_p] for p in params], device=device, dtype=torch.float64)
        self._requests = tuple(requests)
        is_adjusted = [request.grammar is not None or _has_penalty(request) for request in requests]
        self._is_adjusted = any(is_adjusted)
        # Whether a request's tokens have another distribution than that of `Completion.logprobs`.
        self._is_altered = [
            request.params.temperature > 0 and (adjusted or _is_truncated(request))
            for request, adjusted in zip(requests, is_adjusted, strict=True)
        ]
        self._has_tops = any(request.params.top_logprobs for request in requests)
        self._counts: dict[int, Tensor] = {}

    def sample(self, logits: Tensor) -> list[SampledToken]:
        """Sample the next token of each request.

        Args:
            logits: [requests, vocabulary] float32; overwritten.
        """
        adjusted = self._adjusted(logits) if self._is_adjusted else None
        candidates = logits if adjusted is None else adjusted
        greedy_ids = None if self._greedy is None else candidates[self._greedy].argmax(-1, keepdim=True)
        shifted = self._scaled(logits)
        keeps_logs = self._is_adjusted or self._has_tops
        log_weights = shifted.clone() if keeps_logs else None
        weights = shifted.exp_()
        cdf = weights.cumsum(-1, dtype=torch.float64)
        total = cdf[:, -1:].clone()
        if adjusted is not None:
            weights = self._scaled(adjusted).exp_()
            cdf = weights.cumsum(-1, dtype=torch.float64)
        if self._truncated is not None:
            truncated = _apply_top_k_top_p(weights[self._truncated], self._top_k, self._top_p)
            cdf[self._truncated] = truncated.cumsum(-1, dtype=torch.float64)
        drawn = torch.from_numpy(uniforms(self._keys, self._counters)).to(self._device)
        self._counters += np.uint64(1)
        # right=True: the first id whose cumulative weight exceeds the draw, which never has weight zero.
        ids = torch.searchsorted(cdf, drawn[:, None] * cdf[:, -1:], right=True).clamp_(max=logits.shape[1] - 1)
        if greedy_ids is not None:
            ids[self._greedy] = greedy_ids
        if log_weights is None:
            logprobs = (weights.gather(-1, ids).double() / total).log_()
        else:  # a token that a grammar forces may be so unlikely that its weight is 0
            logprobs = log_weights.gather(-1, ids).double() - total.log()
        columns = [ids.double(), logprobs]
        if any(self._is_altered):
            # Top-k and top-p do not change the weights of the tokens that they keep.
            columns.append((weights.gather(-1, ids).double() / cdf[:, -1:]).log_())
        # A single transfer from the device: float64 represents every token id exactly.
        values = torch.cat(columns, dim=1).tolist()
        tops = {} if log_weights is None else self._top_logprobs(log_weights, total)
        tokens = [
            SampledToken(int(row[0]), row[1], tops.get(index), row[2] if altered else None)
            for index, (row, altered) in enumerate(zip(values, self._is_altered, strict=True))
        ]
        for index, counts in self._counts.items():
            counts[tokens[index].token_id] += 1
        return tokens

    def _scaled(self, logits: Tensor) -> Tensor:
        """Return the logits divided by the temperatures, with a maximum of 0 in each row; overwrites them."""
        if self._scale is not None:
            logits /= self._scale
        return logits.sub_(logits.amax(-1, keepdim=True))

    def _adjusted(self, logits: Tensor) -> Tensor:
        """Return the logits with the penalties and the grammars of the requests."""
        adjusted = logits.clone()
        for row, request in enumerate(self._requests):
            if _has_penalty(request):
                if row not in self._counts:
                    sampled = torch.tensor(request.tokens[request.prompt_len :], dtype=torch.int64, device=self._device)
                    self._counts[row] = torch.bincount(sampled, minlength=logits.shape[1]).to(logits.dtype)
                counts, params = self._counts[row], request.params
                adjusted[row] -= params.frequency_penalty * counts + params.presence_penalty * (counts > 0)
            if request.grammar is not None:
                allowed = torch.from_numpy(request.grammar.allowed()).to(self._device)
                adjusted[row].masked_fill_(~allowed, -torch.inf)
        return adjusted

    def _top_logprobs(self, log_weights: Tensor, total: Tensor) -> dict[int, TopLogprobs]:
        tops = {}
        for row, request in enumerate(self._requests):
            if number := request.params.top_logprobs:
                best = log_weights[row].topk(min(number, log_weights.shape[1]))
                values = (best.values.double() - total[row].log()).tolist()
                tops[row] = tuple(zip(best.indices.tolist(), values, strict=True))
        return tops


def _has_penalty(request: Request) -> bool:
    return bool(request.params.presence_penalty or request.params.frequency_penalty)


def _is_truncated(request: Request) -> bool:
    params = request.params
    return params.temperature > 0 and (params.top_k > 0 or params.top_p < 1)


def _rows(selected: Sequence[bool], device: torch.device) -> Tensor | None:
    """Return the indices of the true entries, or None if there are none."""
    return torch.tensor(selected, device=device).nonzero()[:, 0] if any(selected) else None


def _apply_top_k_top_p(weights: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Return `weights` with zeros outside the k most likely tokens, and then outside the nucleus of the remaining ones.

    The nucleus is the smallest set of tokens with mass `top_p` (Holtzman et al. 2020). The most likely token is always
    in it.

    Args:
        weights: [rows, vocabulary], unnormalised probabilities.
        top_k: [rows, 1]; -1 for all tokens.
        top_p: [rows, 1] float64.
    """
    ranked, order = weights.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(weights.shape[1], device=weights.device)
    ranked = ranked.masked_fill_((top_k > 0) & (ranks >= top_k), 0.0)
    mass = ranked.cumsum(-1, dtype=torch.float64)
    outside = mass - ranked >= top_p * mass[:, -1:]
    outside[:, 0] = False
    return torch.zeros_like(weights).scatter_(-1, order, ranked.masked_fill_(outside, 0.0))
