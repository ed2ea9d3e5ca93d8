"""Measure the local backbone on a real model, SmolLM2-135M, against the libraries that a user would choose on a CPU.

Three measurements, each interleaved with the same work of the others, medians:

- a training step: 8 x 8 episodes of 24 sampled tokens in which every group has signal, of astuner and of TRL's
  `GRPOTrainer` (which samples with transformers' `generate`), in float32 and in bfloat16. Trained weights are float32;
- sampling 1, 8 and 64 requests at once: the embedded engine, transformers' `generate` and continuous batching, vLLM,
  and llama.cpp. All sample 24 tokens per request from the same 8 prompts, without a prefix cache;
- the limits of the machine: the rate of a product of two matrices of 2,048 x 2,048 in PyTorch, the better of MKL and
  oneDNN, and the bandwidth with which PyTorch sums 512 MiB. Both are the best of several.

Each library runs in a process with all cores, in the environment whose interpreter is passed. A library without an
interpreter is skipped, with a notice on stderr. llama.cpp reads the GGUF file of the model (weights of 4 bits).

Prints one line of JSON per measurement. The last line is the result: `step_ratio_to_trl` (of the faster dtypes of
both), `sampling_tokens_per_second` and `gemm_share`: floating-point operations of the sampled tokens at 64 requests
over the rate of matrix products, both in the same dtype.

    pip install -e ".[smollm]"
    python tests/bench/bench_real_model.py --trl PYTHON --vllm PYTHON --llama-cpp PYTHON
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench_step import FOLDER, PAUSE_SECONDS, FrameworkProcess, environment
from step_task import Sizes, messages, questions

REQUESTS = (1, 8, 64)
DTYPES = ("float32", "bfloat16")
LEARNING_RATE = 1e-6


class EngineProcess:
    """The process of one inference engine; see sample_engines.py."""

    def __init__(self, engine: str, dtype: str, python: str, folder: Path, tokens: int) -> None:
        self._tokens = tokens
        self._log = (folder / f"{engine}_{dtype}.log").open("w+")
        command = [python, str(FOLDER / "sample_engines.py"), engine, dtype, str(folder), str(tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment()
        )
        self._line()

    def rate(self, requests: int) -> float:
        """Sample `requests` completions at once. Return the sampled tokens per second."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{requests}\n")
        self._process.stdin.flush()
        tokens, seconds = self._line().split()
        if int(tokens) != requests * self._tokens:
            raise RuntimeError(f"sampled {tokens} tokens for {requests} requests; expected {requests * self._tokens}")
        return int(tokens) / float(seconds)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return line
        self._log.seek(0)
        last = next((line.strip() for line in reversed(self._log.readlines()) if line.strip()), "no output")
        self.close()
        raise RuntimeError(last)


def limits() -> dict[str, Any]:
    """Return the rates of matrix products in GFLOPS, and the bandwidth of reading memory in GB/s."""
    import torch

    from astuner.llm_engine.cpu_linear import linear, pack

    def best(run: Any, repeats: int = 8) -> float:
        run()
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        return min(seconds)

    size, gflops = 2048, {}
    with torch.inference_mode():
        for dtype in DTYPES:
            a, b = torch.randn(2, size, size).to(getattr(torch, dtype)).unbind()
            packed = pack(b)
            products = (lambda: a @ b, lambda: linear(a, packed))  # noqa: B023
            gflops[dtype] = round(2 * size**3 / min(map(best, products)) / 1e9)
        block = torch.ones(2**27)
        bandwidth = block.nbytes / best(block.sum) / 1e9
    return {"gemm_gflops": gflops, "read_gb_per_second": round(bandwidth, 1), "threads": torch.get_num_threads()}


def without_end(model: Path, folder: Path) -> None:
    """Write the model with an end token that it never samples, so that every completion has its full length."""
    from transformers import AutoTokenizer

    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    for file in model.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    assert tokenizer.eos_token_id >= config["vocab_size"]
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": tokenizer.eos_token_id}))


def prepare(folder: Path, sizes: Sizes, dtypes: list[str]) -> tuple[Path, int]:
    """Write the model, the prompts and the sizes of each dtype. Return the model's folder and its number of weights."""
    from transformers import AutoTokenizer

    from tutorial.example_real_model.smollm2 import find_gguf, smollm2

    model = smollm2()
    without_end(model, folder / "model")
    for dtype in dtypes:
        (folder / dtype).mkdir()
        (folder / dtype / "model").symlink_to(folder / "model")
        replace(sizes, dtype=dtype).save(folder / dtype)
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = [messages(question) for question in questions(sizes)[: sizes.prompts]]
    render = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    (folder / "prompts.json").write_text(json.dumps([tokenizer.apply_chat_template(row, **render) for row in rows]))
    models = {"folder": str(folder / "model"), "gguf": str(find_gguf(folder))}
    (folder / "models.json").write_text(json.dumps(models))
    from safetensors import safe_open

    with safe_open(next((folder / "model").glob("*.safetensors")), "pt") as weights:
        shapes = [weights.get_slice(name).get_shape() for name in weights.keys()]  # noqa: SIM118
    return model, sum(shape[0] * shape[1] for shape in shapes if len(shape) == 2)


def steps(folder: Path, sizes: Sizes, warm_up: int, dtype: str, pythons: dict[str, str]) -> dict[str, Any]:
    """Alternate the steps of the frameworks. Return their median seconds."""
    processes: dict[str, FrameworkProcess] = {}
    measured: dict[str, list[float]] = {framework: [] for framework in pythons}
    for framework, python in pythons.items():
        processes[framework] = FrameworkProcess(framework, folder / dtype, python)
        processes[framework].ready()
    for number in range(1, sizes.steps + 1):
        for framework, process in processes.items():
            time.sleep(PAUSE_SECONDS)
            seconds = process.step()
            print(f"{framework} {dtype} step {number}: {seconds:.2f} s", file=sys.stderr)
            if number > warm_up:
                measured[framework].append(seconds)
    results = {framework: process.finish()[0] for framework, process in processes.items()}
    expected = sizes.steps * sizes.prompts * sizes.group * sizes.tokens
    for framework, result in results.items():
        if result["completion_tokens"] != expected:
            raise SystemExit(f"{framework} has sampled {result['completion_tokens']} tokens; expected {expected}")
    return {framework: round(statistics.median(seconds), 3) for framework, seconds in measured.items()}


@contextmanager
def engines(
    folder: Path, tokens: int, dtypes: list[str], pythons: dict[str, str]
) -> Iterator[dict[str, EngineProcess]]:
    """Start all engines that have an interpreter, one after the other."""
    names = [(engine, dtype) for engine in ("astuner", "transformers", "transformers_continuous") for dtype in dtypes]
    names += [("vllm", dtype) for dtype in dtypes if "vllm" in pythons]
    names += [("llama_cpp", "q4_1")] if "llama_cpp" in pythons else []
    running: dict[str, EngineProcess] = {}
    try:
        for engine, dtype in names:
            try:
                process = EngineProcess(engine, dtype, pythons.get(engine, sys.executable), folder, tokens)
                running[f"{engine} {dtype}"] = process
                process.rate(1)  # warm-up; some engines fail only now
            except RuntimeError as error:
                running.pop(f"{engine} {dtype}", None)
                print(f"{engine} {dtype} is skipped: {error}", file=sys.stderr)
        yield running
    finally:
        for process in running.values():
            process.close()


def sampling(running: dict[str, EngineProcess], rounds: int) -> dict[str, dict[str, float]]:
    """Alternate the engines. Return the median of the sampled tokens per second, by engine and number of requests."""
    rates: dict[str, dict[str, list[float]]] = {name: {str(n): [] for n in REQUESTS} for name in running}
    for requests in REQUESTS:
        for _ in range(rounds):
            for name, process in running.items():
                time.sleep(PAUSE_SECONDS)
                rates[name][str(requests)].append(process.rate(requests))
    return {
        name: {requests: round(statistics.median(values), 1) for requests, values in by_number.items()}
        for name, by_number in rates.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trl", "vllm", "llama-cpp"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="interpreter of its environment; else it is skipped")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="untimed steps before them")
    parser.add_argument("--rounds", type=int, default=3, help="of sampling")
    args = parser.parse_args()
    pythons = {name: path for name in ("trl", "vllm", "llama_cpp") if (path := getattr(args, name))}
    for name in {"trl", "vllm", "llama_cpp"} - pythons.keys():
        print(f"{name} is skipped: no interpreter was passed", file=sys.stderr)
    machine = limits()
    print(json.dumps({"limits": machine}), flush=True)
    sizes = Sizes(args.prompts, args.group, args.tokens, args.warm_up + args.steps, learning_rate=LEARNING_RATE)
    folder = Path(tempfile.mkdtemp(prefix="bench_real_model_"))
    try:
        _, weights = prepare(folder, sizes, args.dtypes)
        with engines(folder, args.tokens, args.dtypes, pythons) as running:
            rates = sampling(running, args.rounds)
        print(json.dumps({"sampling_tokens_per_second": rates}), flush=True)
        frameworks = {"astuner": sys.executable} | ({"trl": pythons["trl"]} if "trl" in pythons else {})
        seconds = {dtype: steps(folder, sizes, args.warm_up, dtype, frameworks) for dtype in args.dtypes}
        print(json.dumps({"step_seconds": seconds}), flush=True)
    finally:
        shutil.rmtree(folder)
    fastest = {framework: min(by_name[framework] for by_name in seconds.values()) for framework in frameworks}
    largest = str(REQUESTS[-1])
    result = {
        "step_ratio_to_trl": round(fastest["astuner"] / fastest["trl"], 4) if "trl" in fastest else None,
        "sampling_tokens_per_second": {name: by_number[largest] for name, by_number in rates.items()},
        "gemm_share": {
            dtype: round(rates[f"astuner {dtype}"][largest] * 2 * weights / machine["gemm_gflops"][dtype] / 1e9, 3)
            for dtype in args.dtypes
        },
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
