"""The engine samples tokens of SmolLM2 with the logprobs that the trainer computes, also after an update."""

from __future__ import annotations

import asyncio

import pytest
import torch
from transformers import AutoTokenizer

from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.local.forward import token_logprobs
from astuner.backbone.local.policy import Policy
from astuner.config.model import ModelConfig
from astuner.config.trainer import PackMode
from astuner.context_tracker.merge import build_samples
from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.model_tuner.chat_options import CallSettings
from astuner.model_tuner.codec import ChatCodec
from astuner.model_tuner.tuner import ModelTuner
from astuner.schema import Sample
from tutorial.example_real_model import agents, smollm2

QUESTIONS = ["What is 42 - 25?", "Print 'naïve' 👩‍👩‍👧 in Python.", "State 17 + 8 =", "日本 means?"]


async def conversation(engine: EmbeddedEngine, codec: ChatCodec, question: str) -> Sample:
    """Talk for two turns, of which the second extends the first; return the sample."""
    settings = CallSettings(temperature=1.0, max_tokens=8)
    tuner = ModelTuner(engine, codec, settings, episode_id=question)
    messages = agents.conversation(question)
    answer = await tuner.chat(messages)
    await tuner.chat([*messages, answer.message, {"role": "user", "content": f"Are you sure?\n{question}"}])
    (sample,) = build_samples(tuner.calls)
    return sample


def largest_difference(policy: Policy, samples: list[Sample], packed: bool) -> float:
    """Return the largest absolute difference between the sampler's and the trainer's logprob of a sampled token."""
    rows = [TrainingRow(sample.token_ids, sample.train_counts, sample.logprobs) for sample in samples]
    largest = 0.0
    for batch in policy.micro_batches(rows, 1024):
        assert (batch.packing is not None) == packed
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy.model, batch.token_ids, batch.train_counts, 1.0, batch.packing)
        trained = batch.train_counts > 0
        assert (logprobs[trained] < 0).any()
        largest = max(largest, float((logprobs - batch.logprobs)[trained].abs().max()))
    return largest


async def test_engine_and_trainer_agree() -> None:
    if not smollm2.model_folder().exists():
        pytest.skip("the model is not in the cache; python -m tutorial.example_real_model.smollm2 creates it")
    folder = smollm2.model_folder()
    codec = ChatCodec(AutoTokenizer.from_pretrained(folder))
    packs: tuple[PackMode, ...] = ("none", "tree")
    policies = [Policy(ModelConfig(dtype="float32"), str(folder), torch.device("cpu"), pack) for pack in packs]
    engine = EmbeddedEngine(policies[0].frozen_copy(), max_model_len=1024, max_num_seqs=3, tokenizer=codec.tokenizer)

    def differences(samples: list[Sample]) -> list[float]:
        pairs = zip(policies, packs, strict=True)
        return [largest_difference(policy, samples, pack == "tree") for policy, pack in pairs]

    try:
        before = await asyncio.gather(*(conversation(engine, codec, question) for question in QUESTIONS))
        assert engine.stats.reused_tokens > 100  # the second turns, and the common system prompt
        assert max(differences(before)) < 1e-3

        for policy in policies:
            with torch.no_grad():
                for number, weight in enumerate(policy.trainable()):
                    weight.mul_(1 + 1e-2 * (-1) ** number)
        await asyncio.to_thread(engine.update_weights, policies[0].full_weights(), 1)
        after = await asyncio.gather(*(conversation(engine, codec, question) for question in QUESTIONS))
        assert max(differences(after)) < 1e-3
        assert min(differences(before)) > 1e-2
    finally:
        engine.close()
