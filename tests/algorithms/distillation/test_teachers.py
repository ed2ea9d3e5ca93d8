"""Teachers score tokens as a float64 reference does; what a server answers is checked."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astuner.algorithms.distillation.teachers import ModelTeacher, ServerTeacher, TeacherSequence
from astuner.errors import ModelError
from astuner.llm_engine.causal_lm import load_causal_lm

SEQUENCES = [
    TeacherSequence([5, 9, 11, 30, 7, 8, 22], [(2, 4), (5, 7)], [1.0, 0.5]),
    TeacherSequence(np.array([6, 40, 3], np.int32), [(1, 3)], [0.0]),
    TeacherSequence([7] * 20, [(1, 20)], [2.0]),
]


@pytest.fixture(scope="module")
def model(model_folder: Path) -> Any:
    return load_causal_lm(str(model_folder), torch.float32)


def reference(model: Any, sequence: TeacherSequence) -> np.ndarray:
    """The log-probabilities in float64, one forward pass for each sequence."""
    ids = [int(token) for token in sequence.token_ids]
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0].double()
    result = np.zeros(len(ids))
    for (start, end), temperature in zip(sequence.spans, sequence.temperatures, strict=True):
        for place in range(start, end):
            distribution = torch.log_softmax(logits[place - 1] / (temperature or 1.0), dim=-1)
            result[place] = float(distribution[ids[place]])
    return result


@pytest.mark.parametrize("max_tokens", [1, 15, 1000])
def test_a_model_scores_as_the_reference(model: Any, max_tokens: int):
    model.train()
    scored = ModelTeacher(model, max_tokens).logprobs(SEQUENCES)
    assert model.training
    for values, sequence in zip(scored, SEQUENCES, strict=True):
        expected = reference(model, sequence)
        assert values.shape == expected.shape
        assert values.dtype == np.float32
        np.testing.assert_allclose(values, expected, rtol=1e-5, atol=1e-5)
    assert (scored[0] == 0).tolist() == [True, True, False, False, True, False, False]


def test_a_model_with_a_short_context_or_other_token_ids_is_named(model: Any):
    teacher = ModelTeacher(model, 1000)
    length = model.config.max_position_embeddings + 1
    with pytest.raises(ModelError, match=f"has a context of {length - 1} tokens, and a sequence to score has {length}"):
        teacher.logprobs([TeacherSequence([1] * length, [(1, 2)], [1.0])])
    size = model.config.vocab_size
    with pytest.raises(ModelError, match=rf"has {size} token ids, and a sequence to score has the id {size}"):
        teacher.logprobs([TeacherSequence([1, size], [(1, 2)], [1.0])])


Answer = Callable[[dict[str, Any]], tuple[int, Any]]


@contextmanager
def server(answer: Answer, models: Sequence[str] = ("teacher",), key: str | None = None) -> Iterator[str]:
    """A server on 127.0.0.1 that answers completions with `answer`."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_known = key is None or self.headers.get("Authorization") == f"Bearer {key}"
            self._send(200 if is_known else 401, {"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            self._send(*answer(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))

        def _send(self, status: int, body: Any) -> None:
            text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{served.server_port}"
        finally:
            served.shutdown()
            thread.join()


def like_vllm(model: Any) -> Answer:
    """Answer as vLLM does: the log-probability of each prompt token by its id, null for the first one."""
    lock = threading.Lock()

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        ids = body["prompt"]
        assert body["prompt_logprobs"] == 0
        with lock:
            values = ModelTeacher(model, 1000).logprobs([TeacherSequence(ids, [(1, len(ids))], [1.0])])[0].tolist()
        entries = [{str(token): {"logprob": value, "rank": 1}} for token, value in zip(ids, values, strict=True)]
        return 200, {"choices": [{"text": "", "prompt_logprobs": [None, *entries[1:]]}]}

    return answer


def connect(url: str, model: str | None = None, api_key: str | None = None) -> ServerTeacher:
    return ServerTeacher.connect(url, model=model, api_key=api_key, timeout=60.0)


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_a_server_scores_as_its_model(model: Any, suffix: str):
    sequences = [TeacherSequence(each.token_ids, each.spans, [1.0] * len(each.spans)) for each in SEQUENCES]
    with server(like_vllm(model), key="secret") as url:
        teacher = connect(url + suffix, api_key="secret")
        scored = teacher.logprobs(sequences)
        with pytest.raises(ModelError, match=r"sampled at temperature 0\.5, and a teacher behind a server scores"):
            teacher.logprobs(SEQUENCES)
        teacher.close()
    for values, sequence in zip(scored, sequences, strict=True):
        np.testing.assert_allclose(values, reference(model, sequence), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda _: (200, {"choices": [{"text": ""}]}), r"returned 0 prompt_logprobs for a prompt of 2 tokens"),
        (lambda _: (200, {"choices": [{"prompt_logprobs": [None, {"7": {"logprob": -1}}]}]}), "no log-probability of"),
        (lambda _: (200, {"choices": [{"prompt_logprobs": [None, {"0": {"logprob": "x"}}]}]}), "no log-probability of"),
        (lambda _: (500, {"error": "no memory"}), r"answered POST /completions with status 500: .*no memory"),
        (lambda _: (200, "<html>"), r"answered POST /completions with text that is not JSON"),
        (lambda _: (200, []), r"answered POST /completions with list, expected a JSON object"),
    ],
)
def test_an_incomplete_answer_of_a_server_is_an_error(answer: Answer, message: str):
    with server(answer) as url, pytest.raises(ModelError, match=message):
        connect(url)


def test_a_server_that_is_not_there_or_has_no_such_model_is_an_error(model: Any):
    with server(like_vllm(model), models=("a", "b"), key="secret") as url:
        for name in (None, "c"):
            with pytest.raises(
                ModelError, match=rf"serves a, b; set .*teacher_model to one of them \(it is {name!r}\)"
            ):
                connect(url, name, "secret")
        connect(url, "b", "secret").close()
        with pytest.raises(ModelError, match="answered GET /models with status 401"):
            connect(url, "b")
    with pytest.raises(ModelError, match=r"did not answer GET /models: ConnectError: (?!ConnectError)"):
        connect(url)
