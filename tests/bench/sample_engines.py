"""One inference engine of bench_real_model.py, in a process and an environment of its own.

Imports nothing but the standard library and the engine. Reads `folder/prompts.json`, lists of token ids. Then answers
each line on stdin, a number of requests, with a line `TOKENS SECONDS` on stdout: that many requests were sampled at
once, at temperature 1, without an end token, so that each has the same number of tokens. All other output goes to
stderr.

    python sample_engines.py ENGINE DTYPE FOLDER TOKENS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Sample = Callable[[list[list[int]]], int]
"""Samples completions of prompts, and returns the number of sampled tokens."""

MAX_MODEL_LEN = 512


def astuner(model: str, dtype: str, tokens: int) -> Sample:
    """The embedded engine."""
    from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
    from astuner.llm_engine.embedded import EmbeddedEngine
    from astuner.schema import SamplingParams

    loaded = load_causal_lm(model, compute_dtype(dtype, choose_device("cpu")))
    # The other engines recompute the prompts of each batch.
    engine = EmbeddedEngine(loaded, max_model_len=MAX_MODEL_LEN, prefix_cache_tokens=0)
    params = SamplingParams(max_tokens=tokens)

    async def sample_all(prompts: list[list[int]]) -> int:
        completions = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        return sum(len(completion.token_ids) for completion in completions)

    return lambda prompts: asyncio.run(sample_all(prompts))


def transformers(model: str, dtype: str, tokens: int) -> Sample:
    """`generate` of transformers, with padding on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    @torch.inference_mode()
    def sample(prompts: list[list[int]]) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        out = loaded.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **lengths)
        return (out.shape[1] - longest) * len(prompts)

    return sample


def transformers_continuous(model: str, dtype: str, tokens: int) -> Sample:
    """`generate_batch` of transformers: continuous batching with paged attention."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    # Room for 64 requests, without sharing of prompts. By default, the cache takes most of the memory.
    batching = ContinuousBatchingConfig(num_blocks=64 * 2, max_batch_tokens=2048, allow_block_sharing=False)

    @torch.no_grad()  # its cache is written in another thread, which inference mode does not allow
    def sample(prompts: list[list[int]]) -> int:
        outputs = loaded.generate_batch(prompts, config, batching, persistent_manager=True)
        return sum(len(output.generated_tokens) for output in outputs.values())

    return sample


def vllm(model: str, dtype: str, tokens: int) -> Sample:
    """vLLM for CPUs."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    engine = LLM(
        model=model,
        dtype=dtype,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=64,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
    )
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)

    def sample(prompts: list[list[int]]) -> int:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return sample


def llama_cpp(model: str, dtype: str, tokens: int) -> Sample:
    """llama.cpp through llama-cpp-py-sync, with one sequence per request in one context. `model` is a GGUF file."""
    from llama_cpp_py_sync import Llama

    llama = Llama(model, n_ctx=64 * 128, n_batch=2048, n_seq_max=64, n_threads=os.cpu_count(), verbose=False)
    lib, context, memory = llama._lib, llama._ctx, llama._lib.llama_get_memory(llama._ctx)
    samplers = []
    for seed in range(64):
        chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(seed))
        samplers.append(chain)

    def decode(batch: Any, entries: list[tuple[int, int, int, bool]]) -> None:
        """Compute tokens: (token, position, sequence, whether its logits are needed)."""
        batch.n_tokens = len(entries)
        for index, (token, position, sequence, needed) in enumerate(entries):
            batch.token[index], batch.pos[index], batch.logits[index] = token, position, needed
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
        if lib.llama_decode(context, batch):
            raise RuntimeError("llama_decode has failed")

    def sample(prompts: list[list[int]]) -> int:
        lib.llama_memory_clear(memory, True)
        batch = lib.llama_batch_init(2048, 0, 1)
        last: list[int] = []
        for sequence, prompt in enumerate(prompts):
            decode(batch, [(token, at, sequence, at == len(prompt) - 1) for at, token in enumerate(prompt)])
            last.append(lib.llama_sampler_sample(samplers[sequence], context, -1))
        for step in range(tokens - 1):
            decode(batch, [(last[i], len(prompt) + step, i, True) for i, prompt in enumerate(prompts)])
            last = [lib.llama_sampler_sample(samplers[i], context, i) for i in range(len(prompts))]
        lib.llama_batch_free(batch)
        return tokens * len(prompts)

    return sample


ENGINES = {each.__name__: each for each in (astuner, transformers, transformers_continuous, vllm, llama_cpp)}


def main(name: str, dtype: str, folder: Path, tokens: int) -> None:
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    prompts: list[list[int]] = json.loads((folder / "prompts.json").read_text())
    model = json.loads((folder / "models.json").read_text())
    sample = ENGINES[name](model["gguf" if name == "llama_cpp" else "folder"], dtype, tokens)
    print("ready", file=out)
    for line in sys.stdin:
        chosen = [prompts[index % len(prompts)] for index in range(int(line))]
        start = time.perf_counter()
        sampled = sample(chosen)
        print(sampled, time.perf_counter() - start, file=out)
    os._exit(0)  # engines of other libraries leave threads that do not end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
