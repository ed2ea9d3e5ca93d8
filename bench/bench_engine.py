"""Compare the sampling speed of the embedded engine with transformers' `generate`, on a random model of 1 M parameters.

Both run alternately in this process. Prints one line of JSON with medians, in sampled tokens per second. `generate`
runs with one thread and with all threads; its better median is reported.

    python bench/bench_engine.py [--requests 64] [--tokens 64] [--rounds 5]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from astuner.llm_engine.embedded.engine import EmbeddedEngine
from astuner.schema import SamplingParams

MAX_MODEL_LEN = 2048


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            vocab_size=2048,
            tie_word_embeddings=True,
            max_position_embeddings=MAX_MODEL_LEN,
        )
    ).eval()


def make_prompts(count: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(2048) for _ in range(rng.randint(8, 24))] for _ in range(count)]


def engine_rate(engine: EmbeddedEngine, prompts: list[list[int]], tokens: int) -> float:
    params = SamplingParams(max_tokens=tokens)

    async def sample_all() -> int:
        completions = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        return sum(len(completion.token_ids) for completion in completions)

    start = time.perf_counter()
    sampled = asyncio.run(sample_all())
    return sampled / (time.perf_counter() - start)


@torch.inference_mode()
def transformers_rate(model: PreTrainedModel, prompts: list[list[int]], tokens: int) -> float:
    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    start = time.perf_counter()
    out = model.generate(
        ids, attention_mask=mask, do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0
    )
    return (out.shape[1] - longest) * len(prompts) / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    logging.set_verbosity_error()
    model = make_model()
    engine = EmbeddedEngine(model, max_model_len=MAX_MODEL_LEN)
    rates: list[float] = []
    peer_rates: dict[int, list[float]] = {threads: [] for threads in {1, torch.get_num_threads()}}
    for round_ in range(args.rounds + 1):
        prompts = make_prompts(args.requests, seed=round_)
        rates.append(engine_rate(engine, prompts, args.tokens))
        for threads, results in peer_rates.items():
            torch.set_num_threads(threads)
            results.append(transformers_rate(model, prompts, args.tokens))
    engine.close()
    # The first round is a warm-up.
    engine_median = statistics.median(rates[1:])
    peer_median, peer_threads = max(
        (statistics.median(results[1:]), threads) for threads, results in peer_rates.items()
    )
    result = {
        "requests": args.requests,
        "tokens_per_request": args.tokens,
        "tokens_per_second": round(engine_median),
        "peer": {
            "name": "transformers generate",
            "threads": peer_threads,
            "tokens_per_second": round(peer_median),
        },
        "ratio": round(engine_median / peer_median, 2),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
