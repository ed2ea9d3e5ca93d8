"""A fake vLLM server: accepts the command line that astuner passes to vLLM, and has the engine of the tests sample.

Like vLLM, it has a second process, shared memory and a temporary file. FAKE_VLLM selects a misbehaviour: `fails`,
`hangs` before it is ready, `breaks` at the first request, or is `stubborn` and ignores SIGTERM. The engine is at the
port FAKE_VLLM_ENGINE of the test process, because the imports of one cost five seconds of processor time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
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
    child = subprocess.Popen(["sleep", "600"])
    if behaviour == "hangs":
        child.wait()
    assert options.dtype == "float32"  # as the engine
    Handler.model = {"id": options.served_model_name, "max_model_len": options.max_model_len}
    if behaviour == "breaks":
        print("(Worker) RuntimeError: Unsupported CPU attention", flush=True)
    try:
        ThreadingHTTPServer((options.host, options.port), Handler).serve_forever()
    finally:
        child.kill()


class Handler(BaseHTTPRequestHandler):
    """Answers for the server, and passes requests for completions on."""

    protocol_version = "HTTP/1.1"
    model: dict[str, object]

    def do_GET(self) -> None:
        self._answer(200, json.dumps({"data": [self.model]}).encode())  # also to /health, where the status counts

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if os.environ.get("FAKE_VLLM") == "breaks":
            self._answer(500, b"{}")
            return
        engine = http.client.HTTPConnection("127.0.0.1", int(os.environ["FAKE_VLLM_ENGINE"]))
        engine.request("POST", self.path, body, {"Content-Type": "application/json"})
        response = engine.getresponse()
        self._answer(response.status, response.read())
        engine.close()

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


if __name__ == "__main__":
    main()
