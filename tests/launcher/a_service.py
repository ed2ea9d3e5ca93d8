"""A service: `python a_service.py PORT NOTE` serves HTTP, has a child that ignores SIGTERM where STUBBORN is set, notes
both processes in the file NOTE, and ends with exit code 7 when asked for `/crash`."""

from __future__ import annotations

import os
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHILD = """
import os, signal, time
if "STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
print("ready", flush=True)
time.sleep(600)
"""


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/crash":
            print("crashing", flush=True)
            os._exit(7)
        self.send_response(200 if self.path == "/health" else 404)
        self.send_header("Content-Length", "0")
        self.end_headers()


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE)
assert child.stdout
child.stdout.readline()
print("keys:", os.environ.get("OPENAI_API_KEY"), os.environ.get("ENV_TOKEN"))
note = Path(sys.argv[2])
note.with_suffix(".tmp").write_text(f"{os.getpid()} {child.pid}")
note.with_suffix(".tmp").replace(note)
server.serve_forever()
