"""Whether the engines sample with the weights that are trained: asked once, before anything relies on it."""

from __future__ import annotations

import asyncio

import torch

from astuner.backbone.step_credit import refuse_foreign_logprobs
from astuner.backbone.verl.client_engine import VerlEngine
from astuner.backbone.verl.fields import sample_fields
from astuner.backbone.verl.trainer import VerlTrainer
from astuner.schema import CallSpan, Completion, Sample, SamplingParams

_TOKENS = 16


def check_first_sync(
    trainer: VerlTrainer, engine: VerlEngine, prompt_ids: list[int], dtype: torch.dtype, temperature: float
) -> None:
    """Have every engine go on from a prompt, and the trainer say how likely that was.

    Args:
        trainer: whose weights the engines should have.
        engine: all of verl's engines.
        prompt_ids: at least one token id.
        dtype: what the model computes in.
        temperature: in training.

    Raises:
        BackboneError: the logprobs differ by more than rounding, so the weights did not arrive.
    """
    tokens = min(_TOKENS, engine.max_model_len - len(prompt_ids))
    # As many for each data-parallel worker; engines that have fewer requests get the next.
    requests = trainer.workers * max(len(trainer.servers), 1)
    seeds = [SamplingParams(temperature=temperature, max_tokens=tokens, seed=seed) for seed in range(requests)]

    async def ask() -> list[Completion]:
        return await asyncio.gather(*(engine.generate(prompt_ids, params) for params in seeds))

    answers = asyncio.run(ask())
    samples = [_sample(prompt_ids, answer) for answer in answers]
    keys = [f"first-sync-{number}" for number in range(len(samples))]
    trainer.put(keys, [sample_fields(sample) for sample in samples])
    try:
        own = trainer.own_logprobs(keys, [len(sample.token_ids) for sample in samples])
    finally:
        trainer.clear(keys)
    pairs = zip(own, answers, strict=True)
    # The worst of them: one engine without the weights must not hide behind the others.
    worst = max(float((ours - torch.tensor(theirs.logprobs)).abs().mean()) for ours, theirs in pairs)
    refuse_foreign_logprobs(worst, dtype, "first weight sync")


def _sample(prompt_ids: list[int], answer: Completion) -> Sample:
    start, ids = len(prompt_ids), (*prompt_ids, *answer.token_ids)
    mask = (0,) * start + (1,) * len(answer.token_ids)
    logprobs = (0.0,) * start + answer.logprobs
    span = CallSpan("first-sync", start, len(ids))
    return Sample(ids, mask, logprobs, tuple(range(len(ids))), 1.0, (span,))
