"""An OpenAI-compatible endpoint without a model, for trying out the example offline.

It finds the calculations in the text of a request, and turns them into questions. For your own documents, set
`llm.base_url` to the endpoint of a real model. Run: `python -m tutorial.example_data_generation.helper_endpoint PORT`.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

CALCULATION = re.compile(r"(\d+ [-+*] \d+) = (-?\d+)")
ASKED = re.compile(r"- What is (\d+ [-+*] \d+)\?")


def answer(request: str) -> dict:
    """Return the answer to a request of astuner's data generation."""
    results = dict(CALCULATION.findall(request))
    if request.startswith("Write"):
        count = int(request.split()[1])
        asked = set(ASKED.findall(request))
        new = [(left, result) for left, result in results.items() if left not in asked][:count]
        # A model would repeat itself, too, if everything in the text has been asked.
        new = new or list(results.items())[:1]
        return {"tasks": [{"question": f"What is {left}?", "answer": result} for left, result in new]}
    if "answerable" in request:
        (asked_now,) = re.findall(r"Question: What is (.*)\?", request)
        return {"answerable": asked_now in results, "answer": results.get(asked_now, "")}
    if "Do the two answers" in request:
        first, second = re.findall(r"Answer \d: (.*)", request)
        return {"same": first == second}
    return {"reason": "The answer is a number.", "keep": re.search(r'"answer": "-?\d+"', request) is not None}


class Handler(BaseHTTPRequestHandler):
    """Answers chat completions."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        request = "\n".join(message["content"] for message in body["messages"])
        text = json.dumps(answer(request))
        usage = {"prompt_tokens": len(request) // 4, "completion_tokens": len(text) // 4}
        message = {"role": "assistant", "content": text}
        reply = {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "created": 0,
            "model": body["model"],
            "choices": [{"index": 0, "finish_reason": "stop", "message": message}],
            "usage": {**usage, "total_tokens": sum(usage.values())},
        }
        content = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format, *args):
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
