"""A client's sampling request on an engine."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from astuner.backbone.tinker_server import wire
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.samplers import Sampler
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.schema import SamplingParams

# A character takes at most four byte tokens; a few more let a sequence that begins within a token be seen.
_TOKENS_PER_CHARACTER, _TOKENS_MORE = 4, 8


async def sample(start: StartingModel, sampler: Sampler, request: wire.SampleRequest, ids: list[int]) -> dict[str, Any]:
    """Serve a request; its samples are computed side by side, and with those of other requests.

    Args:
        start: whose tokenizer reads stop strings.
        sampler: has the weights.
        request: what is asked.
        ids: the checked prompt.

    Returns:
        The wire's SampleResponse.
    """
    numbers, texts = _stops(request.sampling_params)
    asked = [_params(start, request.sampling_params, numbers, index) for index in range(request.num_samples)]
    ends = _ends_with_one_of(texts, start.tokenizer) if texts else None
    completions = asyncio.gather(*(sampler.engine.generate(ids, params, stops=ends) for params in asked))
    answer: dict[str, Any] = {"type": "sample"}
    if request.prompt_logprobs or request.topk_prompt_logprobs:
        scores = asyncio.to_thread(sampler.prompt_logprobs, ids, request.topk_prompt_logprobs)
        done, (logprobs, likeliest) = await asyncio.gather(completions, scores)
        if request.prompt_logprobs:
            answer["prompt_logprobs"] = logprobs
        if request.topk_prompt_logprobs:
            answer["topk_prompt_logprobs"] = likeliest
    else:
        done = await completions
    answer["sequences"] = [
        {"stop_reason": one.finish_reason, "tokens": list(one.token_ids), "logprobs": list(one.logprobs)}
        for one in done
    ]
    return answer


def _params(start: StartingModel, given: wire.SamplingParams, stops: Sequence[int], index: int) -> SamplingParams:
    return SamplingParams(
        temperature=given.temperature,
        top_p=given.top_p,
        top_k=given.top_k,
        max_tokens=start.max_length if given.max_tokens is None else given.max_tokens,
        stop_token_ids=(*start.stop_token_ids, *stops),
        seed=_seed(given.seed, index),
    )


def _seed(seed: int | None, index: int) -> int | None:
    """Return the seed of sample `index`: samples of one request differ, and are not those of a neighbouring seed."""
    if seed is None or index == 0:
        return seed
    return int.from_bytes(hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")


def _stops(params: wire.SamplingParams) -> tuple[list[int], list[str]]:
    """Return the token ids and the texts that end a completion.

    Raises:
        Refusal: an empty text, which is everywhere.
    """
    stop = [params.stop] if isinstance(params.stop, str) else params.stop or []
    texts = [one for one in stop if isinstance(one, str)]
    if "" in texts:
        raise Refusal("sampling_params.stop has an empty text; leave it out to stop at the model's end tokens only")
    return [one for one in stop if isinstance(one, int)], texts


def _ends_with_one_of(texts: Sequence[str], tokenizer: Any) -> Callable[[Sequence[int]], bool]:
    """Return whether one of `texts` is in what was sampled; asked token by token, so only its end is looked at."""
    window = _TOKENS_PER_CHARACTER * max(map(len, texts)) + _TOKENS_MORE

    def ends(sampled: Sequence[int]) -> bool:
        said = tokenizer.decode(list(sampled[-window:]), skip_special_tokens=False)
        return any(text in said for text in texts)

    return ends
