"""Measure the local backbone on a real model, SmolLM2-135M, against the libraries that a user would choose on a CPU.

Three measurements. The libraries take turns, and a library is stopped while another one is measured:

- a training step: 8 x 8 episodes of 24 sampled tokens in which every group has signal, of astuner and of TRL's
  `GRPOTrainer` (which samples with transformers' `generate`), in float32 and in bfloat16. Trained weights are float32.
  The first step is a warm-up, and the median of the others is printed. TRL computes small micro-batches, because 64
  rows at once need much memory;
- sampling 1 and 64 requests at once: the embedded engine and transformers' `generate` in both dtypes, transformers'
  continuous batching and vLLM in the last dtype, and llama.cpp. All sample 24 tokens per request from the same 8
  prompts, without a prefix cache. Medians;
- the limits of the machine: the rate of a product of two matrices of 2,048 x 2,048 in PyTorch, the better of MKL and
  oneDNN, and the bandwidth with which PyTorch sums 512 MiB. Both are the best of several.

All libraries must sample the same number of tokens; else the benchmark fails. The only exception is continuous batching
on slow machines: it stops after `--seconds`, its rate is that of the tokens sampled until then, and `sampled_tokens`
shows their number. Any engine is measured until it has taken that many seconds, and at most `--rounds` times.

Each library runs in a process with all cores, in the environment whose interpreter is passed. A library without an
interpreter is skipped, with a notice on stderr. llama.cpp reads the GGUF file of the model (weights of 4 bits).

Prints one line of JSON per measurement. The line before the last has the shares of the limits that astuner reaches in
each dtype: `gemm_shares`, the rate of floating-point operations over the rate of matrix products when it samples the
largest number of requests, prompts included; `step_gemm_shares`, the same for a step; and `bandwidth_shares`, the rate
at which it reads weights over the bandwidth of memory when it samples one request.

The last line is the result: `step_ratio_to_trl` (of the faster dtypes of both), `sampling_tokens_per_second` at the
largest number of requests, and `gemm_share`, that of the faster dtype.

    pip install -e ".[smollm]"
    python bench/bench_real_model.py --trl PYTHON --vllm PYTHON --llama-cpp PYTHON
"""

from __future__ import annotations

import argparse
import json
import os
import signal
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

from bench_step import FOLDER, PAUSE_SECONDS, ROOT, FrameworkProcess, environment
from machine_limits import Operations, Workload, bandwidth_shares, gemm_shares, measure_limits
from step_task import Sizes, messages, questions

DTYPES = ("float32", "bfloat16")
LEARNING_RATE = 1e-6


@contextmanager
def awake(process: subprocess.Popen[str]) -> Iterator[None]:
    """Let a stopped process run. Threads of a library that wait actively would take time from the others."""
    os.kill(process.pid, signal.SIGCONT)
    try:
        yield
    finally:
        os.kill(process.pid, signal.SIGSTOP)


class EngineProcess:
    """The process of one inference engine; see sample_engines.py."""

    def __init__(self, engine: str, dtype: str, python: str, folder: Path, tokens: int) -> None:
        self._name = f"{engine} {dtype}"
        self._may_stop_early = engine == "transformers_continuous"
        self._tokens = tokens
        self._log = (folder / f"{engine}_{dtype}.log").open("w+")
        command = [python, str(FOLDER / "sample_engines.py"), engine, dtype, str(folder), str(tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment()
        )
        try:
            with awake(self._process):
                self._line()
        except RuntimeError:
            self.close()
            raise

    def sample(self, requests: int, limit: float) -> tuple[int, float]:
        """Sample `requests` completions at once. Return the number of sampled tokens, and the seconds.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        with awake(self._process):
            self._process.stdin.write(f"{requests} {limit}\n")
            self._process.stdin.flush()
            tokens, seconds = self._line().split()
        expected = requests * self._tokens
        if int(tokens) != expected and not (self._may_stop_early and float(seconds) >= limit):
            raise SystemExit(f"{self._name} has sampled {tokens} tokens for {requests} requests; expected {expected}")
        return int(tokens), float(seconds)

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
        raise RuntimeError(last)


# Answers end with another token than prompts, see `without_end`.
CHAT_TEMPLATE = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {{- ('<|never|>' if message.role == 'assistant' else '<|im_end|>') + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def real_model() -> Path:
    """Return the folder of SmolLM2-135M."""
    from tutorial.example_real_model.smollm2 import smollm2

    return smollm2()


def without_end(model: Path, folder: Path) -> None:
    """Write the model with an end token that it never samples, so that every completion has its full length.

    Both the token that ends documents and the token that ends answers are outside the model's vocabulary.
    """
    from transformers import AutoTokenizer

    folder.mkdir()
    config = json.loads((model / "config.json").read_text())
    for file in model.glob("*.safetensors"):
        (folder / file.name).symlink_to(file)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens([f"<|filler_{number}|>" for number in range(len(tokenizer), config["vocab_size"])])
    tokenizer.add_special_tokens({"eos_token": "<|never|>"})
    assert tokenizer.eos_token_id >= config["vocab_size"]
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": tokenizer.eos_token_id}))


def prepare(folder: Path, model: Path, sizes: Sizes, dtypes: list[str], *, with_gguf: bool) -> list[list[int]]:
    """Write the model, the prompts and the sizes of each dtype. Return the prompts."""
    from transformers import AutoTokenizer

    without_end(model, folder / "model")
    for dtype in dtypes:
        (folder / dtype).mkdir()
        (folder / dtype / "model").symlink_to(folder / "model")
        replace(sizes, dtype=dtype).save(folder / dtype)
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    rows = [messages(question) for question in questions(sizes)[: sizes.prompts]]
    render = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
    prompts: list[list[int]] = [tokenizer.apply_chat_template(row, **render) for row in rows]
    (folder / "prompts.json").write_text(json.dumps(prompts))
    models = {"folder": str(folder / "model")}
    if with_gguf:
        from tutorial.example_real_model.smollm2 import find_gguf

        models["gguf"] = str(find_gguf(folder))
    (folder / "models.json").write_text(json.dumps(models))
    return prompts


def steps(folder: Path, sizes: Sizes, warm_up: int, pythons: dict[str, str]) -> dict[str, dict[str, float]]:
    """Alternate the steps of the frameworks. Return the median seconds and the peak memory in MiB of each."""
    measured: dict[str, list[float]] = {framework: [] for framework in pythons}
    with frameworks(folder, pythons) as processes:
        for number in range(1, sizes.steps + 1):
            for framework, process in processes.items():
                time.sleep(PAUSE_SECONDS)
                with awake(process.process):
                    seconds = process.step()
                print(f"{framework} {sizes.dtype} step {number}: {seconds:.2f} s", file=sys.stderr)
                if number > warm_up:
                    measured[framework].append(seconds)
        peaks = {}
        expected = sizes.steps * sizes.prompts * sizes.group * sizes.tokens
        for framework, process in processes.items():
            os.kill(process.process.pid, signal.SIGCONT)
            result, peaks[framework] = process.finish()
            # astuner counts only the tokens that it trains, those of groups with signal.
            if result["completion_tokens"] != expected:
                raise SystemExit(f"{framework} has trained {result['completion_tokens']} tokens; expected {expected}")
    return {
        framework: {"seconds": round(statistics.median(seconds), 3), "peak_memory_mb": round(peaks[framework])}
        for framework, seconds in measured.items()
    }


@contextmanager
def frameworks(folder: Path, pythons: dict[str, str]) -> Iterator[dict[str, FrameworkProcess]]:
    """Start the frameworks, one after the other, up to their first step."""
    processes: dict[str, FrameworkProcess] = {}
    try:
        for framework, python in pythons.items():
            process = processes[framework] = FrameworkProcess(framework, folder, python)
            with awake(process.process):
                process.ready()
        yield processes
    finally:
        for process in processes.values():
            process.process.kill()
            process.process.wait()


@contextmanager
def engines(
    folder: Path, tokens: int, dtypes: list[str], pythons: dict[str, str], limit: float
) -> Iterator[dict[str, EngineProcess]]:
    """Start all engines that have an interpreter, one after the other."""
    names = [(engine, dtype) for engine in ("astuner", "transformers") for dtype in dtypes]
    # The slow and the large engines only in the faster dtype.
    names += [("transformers_continuous", dtypes[-1])]
    names += [("vllm", dtypes[-1])] if "vllm" in pythons else []
    names += [("llama_cpp", "q4_1")] if "llama_cpp" in pythons else []
    running: dict[str, EngineProcess] = {}
    try:
        for engine, dtype in names:
            try:
                process = EngineProcess(engine, dtype, pythons.get(engine, sys.executable), folder, tokens)
                running[f"{engine} {dtype}"] = process
                process.sample(1, limit)  # warm-up; some engines fail only now
            except RuntimeError as error:
                if failed := running.pop(f"{engine} {dtype}", None):
                    failed.close()
                print(f"{engine} {dtype} is skipped: {error}", file=sys.stderr)
        yield running
    finally:
        for process in running.values():
            process.close()


def sampling(running: dict[str, EngineProcess], requests: int, rounds: int, limit: float) -> dict[str, dict[str, Any]]:
    """Alternate the engines. Return the tokens and the median of tokens per second of each engine."""
    measured: dict[str, list[tuple[int, float]]] = {name: [] for name in running}
    for _ in range(rounds):
        for name, process in running.items():
            if sum(seconds for _, seconds in measured[name]) < limit:
                time.sleep(PAUSE_SECONDS)
                measured[name].append(process.sample(requests, limit))
                print(f"{name}, {requests} requests: {measured[name][-1]}", file=sys.stderr)
    return {
        name: {
            "sampled_tokens": values[-1][0],
            "tokens_per_second": round(statistics.median(tokens / seconds for tokens, seconds in values), 1),
        }
        for name, values in measured.items()
    }


def rates_of_astuner(rates: dict[str, float]) -> dict[str, float]:
    """Return the rates of the embedded engine by dtype, from those of all engines."""
    return {name.removeprefix("astuner "): rate for name, rate in rates.items() if name.startswith("astuner ")}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("trl", "vllm", "llama-cpp"):
        parser.add_argument(f"--{name}", metavar="PYTHON", help="interpreter of its environment; else it is skipped")
    parser.add_argument("--model", type=Path, help="folder of another Llama-like model")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, help="default: those that the processor computes fast")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--steps", type=int, default=2, help="timed steps")
    parser.add_argument("--warm-up", type=int, default=1, help="untimed steps before them")
    parser.add_argument("--trl-micro-batch", type=int, default=16, help="rows that TRL computes at once in an update")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64], help="numbers of requests, at most 64")
    parser.add_argument("--rounds", type=int, default=3, help="of sampling")
    parser.add_argument("--seconds", type=float, default=20, help="limit of sampling, per engine and requests")
    args = parser.parse_args()
    if args.dtypes is None:
        from astuner.llm_engine.cpu_linear import multiplies_bfloat16

        args.dtypes = list(DTYPES if multiplies_bfloat16() else DTYPES[:1])
    return args


def main() -> None:
    args = parse_arguments()
    sys.path.insert(0, str(ROOT))  # for `tutorial`, which is not installed
    pythons = {name: path for name in ("trl", "vllm", "llama_cpp") if (path := getattr(args, name))}
    for name in {"trl", "vllm", "llama_cpp"} - pythons.keys():
        print(f"{name} is skipped: no interpreter was passed", file=sys.stderr)
    machine = measure_limits(args.dtypes)
    print(json.dumps({"limits": machine}), flush=True)
    sizes = Sizes(
        args.prompts,
        args.group,
        args.tokens,
        args.warm_up + args.steps,
        learning_rate=LEARNING_RATE,
        trl_micro_batch=min(args.trl_micro_batch, args.prompts * args.group),
    )
    with tempfile.TemporaryDirectory(prefix="bench_real_model_") as name:
        folder, model = Path(name), args.model or real_model()
        prompts = prepare(folder, model, sizes, args.dtypes, with_gguf="llama_cpp" in pythons)
        rates: dict[int, dict[str, dict[str, Any]]] = {}
        with engines(folder, args.tokens, args.dtypes, pythons, args.seconds) as running:
            for requests in args.requests:
                rates[requests] = sampling(running, requests, args.rounds, args.seconds)
                print(json.dumps({"requests": requests, "engines": rates[requests]}), flush=True)
        trainers = {"astuner": sys.executable} | ({"trl": pythons["trl"]} if "trl" in pythons else {})
        by_dtype = {}
        for dtype in args.dtypes:
            by_dtype[dtype] = steps(folder / dtype, replace(sizes, dtype=dtype), args.warm_up, trainers)
            print(json.dumps({"step": dtype, "frameworks": by_dtype[dtype]}), flush=True)
    fastest = {name: min(measured[name]["seconds"] for measured in by_dtype.values()) for name in trainers}
    operations, workload = Operations.of(model), Workload(prompts, args.group, args.tokens)
    sampled, of_one_request = (
        {name: values["tokens_per_second"] for name, values in rates.get(requests, {}).items()}
        for requests in (max(rates), 1)
    )
    of_astuner = rates_of_astuner(sampled)
    seconds = {dtype: measured["astuner"]["seconds"] for dtype, measured in by_dtype.items()}
    shares = {
        "gemm_shares": gemm_shares(of_astuner, operations.of_token(workload), machine),
        "step_gemm_shares": gemm_shares(
            {dtype: 1 / s for dtype, s in seconds.items()}, operations.of_step(workload), machine
        ),
        "bandwidth_shares": bandwidth_shares(rates_of_astuner(of_one_request), operations, machine),
    }
    print(json.dumps(shares))
    result = {
        "step_ratio_to_trl": round(fastest["astuner"] / fastest["trl"], 4) if "trl" in fastest else None,
        "sampling_tokens_per_second": sampled,
        "gemm_share": shares["gemm_shares"][max(of_astuner, key=lambda dtype: of_astuner[dtype])],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
