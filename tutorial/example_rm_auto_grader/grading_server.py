"""An OpenAI-compatible server on 127.0.0.1 that stands in for a grading model, so that the example needs no network.

    python -m tutorial.example_rm_auto_grader.grading_server PORT

Its first rubric only asks for politeness. When it is shown which answers this rubric graded wrongly, it proposes
rubrics on the number and on the reason. It grades an answer by the rubrics that the prompt contains.
"""

import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

POLITE = "The answer is polite."
RIGHT = "The number in the answer is the right sum."
REASON = "The answer gives a reason with the word because."


def fenced_texts(text: str) -> dict[str, str]:
    """Return the texts of a prompt by their titles."""
    parts = re.findall(r"===== ([^=\n]+) (\w+) =====\n(.*?)\n===== end of \1 \2 =====", text, re.DOTALL)
    return {title: content for title, _, content in parts}


def grade(rubrics: str, question: str, answer: str) -> float:
    """Return 1.0 if an answer meets all rubrics, else 0.0."""
    checks = []
    if POLITE in rubrics:
        checks.append("thank" in answer.lower())
    if RIGHT in rubrics:
        numbers = [int(number) for number in re.findall(r"\d+", question)]
        first = re.search(r"\d+", answer)
        checks.append(first is not None and int(first[0]) == sum(numbers))
    if REASON in rubrics:
        checks.append("because" in answer)
    return float(all(checks))


def reply(messages: list[dict]) -> dict:
    """Return the JSON object that answers a prompt."""
    instructions, text = messages[0]["content"], messages[-1]["content"]
    if "Revise them" in instructions:
        return {"rubrics": [RIGHT, REASON]}
    if "You write criteria" in instructions:
        return {"rubrics": [POLITE]}
    texts = fenced_texts(text)
    score = grade(instructions, texts["question"], texts["answer to grade"])
    return {"reason": "it meets all criteria" if score else "it misses a criterion", "scores": {"score": score}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self.send({"object": "list", "data": [{"id": "grader", "object": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        text = json.dumps(reply(body["messages"]))
        prompt_tokens = sum(len(message["content"].split()) for message in body["messages"])
        self.send(
            {
                "id": "1",
                "object": "chat.completion",
                "created": 1,
                "model": body["model"],
                "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": text}}],
                "usage": {
                    "prompt_tokens": prompt_tokens,
                    "completion_tokens": len(text.split()),
                    "total_tokens": prompt_tokens + len(text.split()),
                },
            }
        )

    def send(self, content: dict) -> None:
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


def server(port: int) -> ThreadingHTTPServer:
    """Return a server on a port of 127.0.0.1; 0 selects a free one."""
    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    server(int(sys.argv[1])).serve_forever()
