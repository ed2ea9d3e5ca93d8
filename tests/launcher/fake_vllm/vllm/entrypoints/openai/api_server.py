"""A fake vLLM server: accepts the command line that astuner passes to vLLM, and serves the embedded engine.

Like vLLM, it has a second process, shared memory and a temporary file. FAKE_VLLM selects a misbehaviour: `fails`,
`hangs` before it is ready, `breaks` at the first request, or is `stubborn` and ignores SIGTERM.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.shared_memory import SharedMemory

OPTIONS = {
    "model": str,
    "served-model-name": str,
    "host": str,
    "port": int,
    "seed": int,
    "dtype": str,
    "tensor-parallel-size": int,
    "max-model-len": int,
    "max-num-seqs": int,
    "logprobs-mode": str,
    "generation-config": str,
    "uvicorn-log-level": str,
    "kv-cache-memory-bytes": int,
}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in OPTIONS.items():
        parser.add_argument(f"--{name}", type=kind, required=True)
    for flag in ("enforce-eager", "disable-log-stats"):
        parser.add_argument(f"--{flag}", action="store_true", required=True)
    options = parser.parse_args()
    assert options.host == "127.0.0.1"
    behaviour = os.environ.get("FAKE_VLLM", "")
    if behaviour == "fails":
        print("(EngineCore) ValueError: Free memory on device cuda:0 is less than desired GPU memory utilization")
        print("\n".join(f"  a line of a traceback, {n}" for n in range(40)))
        sys.exit("Engine core initialization failed. See root cause above.")
    signal.signal(signal.SIGTERM, signal.SIG_IGN if behaviour == "stubborn" else lambda number, frame: sys.exit(0))
    memory = SharedMemory(create=True, size=4096)
    print("shared memory:", memory.name, flush=True)
    tempfile.NamedTemporaryFile(delete=False).close()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    if behaviour == "hangs":
        child.wait()
    serve(options)


def serve(options: argparse.Namespace) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from astuner.llm_engine.embedded.engine import EmbeddedEngine
    from tests.llm_engine.completions_server import serving

    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, options.dtype))
    engine = EmbeddedEngine(model, max_model_len=options.max_model_len, max_num_seqs=options.max_num_seqs)
    if os.environ.get("FAKE_VLLM") == "breaks":
        print("(Worker) RuntimeError: Unsupported CPU attention", flush=True)
        engine.close()
    with contextlib.closing(engine), serving(engine, model=options.served_model_name, port=options.port):
        threading.Event().wait()


if __name__ == "__main__":
    main()
