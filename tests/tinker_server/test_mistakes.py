"""Errors that the client raises for invalid requests."""

from __future__ import annotations

import contextlib
import re
import socket
from pathlib import Path
from typing import Any

import httpx
import pytest

from astuner.tinker_server.service import Limits
from astuner.tinker_server.trainable_model import BaseLanguageModel
from tests.tinker_server.served import Served, datum, public_pb, serving, tinker

IDS = [1, 2, 3, 4]


def many(length: int = 3) -> list[float]:
    return [1.0] * length


def sparse() -> Any:
    return tinker.TensorData([1], "int64", [3, 2], sparse_crow_indices=[0, 1, 1, 1], sparse_col_indices=[0])


def message(dtype: int = 2, dense: bytes = bytes(8), chunk: bytes = bytes(4)) -> bytes:
    """Return a pass over one token in the client's own message."""
    request = public_pb.ForwardBackwardRequest(model_id="none", seq_id=1, loss_fn="cross_entropy")
    added = request.data.add()
    added.model_input.add().encoded_text.tokens = chunk
    added.loss_fn_inputs["target_tokens"].dtype = dtype
    added.loss_fn_inputs["target_tokens"].dense = dense
    return bytes(request.SerializeToString())


@pytest.mark.parametrize(
    ("data", "loss", "config", "message"),
    [
        (
            [datum(IDS)],
            "mse",
            None,
            "'mse' is unknown; available: cross_entropy, importance_sampling, ppo, cispo, dro, gspo",
        ),
        ([datum(IDS)], "stable_reinforce", None, "only samplers of the Tinker service record; use another loss_fn: "),
        ([datum(IDS)], "dro", {"beta": "high"}, "loss_fn_config of dro has a text for beta; send a number"),
        ([datum(IDS)], "ppo", None, "logprobs is missing, advantages is missing"),
        ([datum(IDS, advantages=many())], "cross_entropy", None, "advantages is unknown"),
        ([datum(IDS, weights=many(2))], "cross_entropy", None, "weights has 2 numbers, but model_input has 3 tokens"),
        ([datum(IDS)], "cross_entropy", {"beta": 1.0}, "has 'beta'; its options are: none"),
        ([datum(IDS), datum([1, 2, 5000])], "cross_entropy", None, "datum 1 of 2: target_tokens .*0 to 579"),
        ([datum([-1, 2, 3])], "cross_entropy", None, "model_input has token ids from -1 to 2"),
        ([datum([1] * 514)], "cross_entropy", None, "model_input has 513 tokens; this model takes 1 to 512"),
        ([datum([1])], "cross_entropy", None, "model_input has 0 tokens"),
    ],
)
def test_invalid_data(
    served: Served, client: Any, data: list[Any], loss: str, config: dict[str, float] | None, message: str
):
    training = client.create_lora_training_client(served.model, rank=2).result()
    for run in (training.forward, training.forward_backward):
        with pytest.raises(tinker.BadRequestError, match=message):
            run(data, loss, config).result()
    # The model still works.
    training.forward_backward([datum(IDS)], "cross_entropy").result()


def test_unsupported_tensors_and_chunks(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    matrix = tinker.Datum(
        model_input=tinker.ModelInput.from_ints(IDS[:-1]),
        loss_fn_inputs={"target_tokens": tinker.TensorData([1, 2, 3, 4, 5, 6], "int64", [3, 2])},
    )
    with pytest.raises(tinker.BadRequestError, match=r"target_tokens has shape \[3, 2\]; .* dense tensors"):
        training.forward([matrix], "cross_entropy").result()
    with pytest.raises(tinker.BadRequestError, match="dense tensors"):
        training.forward([datum(IDS, weights=sparse())], "cross_entropy").result()
    image = tinker.types.ImageChunk(data=b"png", format="png", expected_tokens=1)
    with_image = tinker.Datum(
        model_input=tinker.ModelInput(chunks=[image]), loss_fn_inputs={"target_tokens": [1], "weights": [1.0]}
    )
    with pytest.raises(tinker.BadRequestError, match=r"a chunk of type 'image'; .* encoded_text only"):
        training.forward([with_image], "cross_entropy").result()


def test_non_finite_numbers(served: Served, client: Any):
    training = client.create_lora_training_client(served.model, rank=2).result()
    tensors = '{"target_tokens": {"data": [1], "dtype": "int64"}, "weights": {"data": [NaN], "dtype": "float32"}}'
    data = f'[{{"model_input": {{"chunks": [{{"tokens": [1]}}]}}, "loss_fn_inputs": {tensors}}}]'
    body = f'{{"model_id": "{training.model_id}", "forward_input": {{"loss_fn": "cross_entropy", "data": {data}}}}}'
    answer = httpx.post(f"{served.url}/api/v1/forward", content=body)
    assert (answer.status_code, answer.json()["detail"]) == (
        400,
        "datum 0 of 1: weights has numbers that are not finite",
    )


def test_unknown_models_and_checkpoints(served: Served, client: Any):
    with pytest.raises(tinker.NotFoundError, match="base_model is 'other/model', but this server has only"):
        client.create_lora_training_client("other/model").result()
    with pytest.raises(tinker.NotFoundError, match="base_model is 'other/model'"):
        client.create_sampling_client(base_model="other/model").result()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        client.create_sampling_client("tinker://gone/weights/x").result()
    with pytest.raises(tinker.NotFoundError, match="no training run"):
        client._rest_client().get_training_run("gone").result()
    training = client.create_lora_training_client(served.model, rank=2).result()
    future = httpx.post(f"{served.url}/api/v1/unload_model", json={"model_id": training.model_id}).json()
    unloaded = httpx.post(f"{served.url}/api/v1/retrieve_future", json={"request_id": future["request_id"]}).json()
    assert unloaded == {"type": "unload_model", "model_id": training.model_id}
    with pytest.raises(tinker.NotFoundError, match="it was unloaded"):
        training.optim_step(tinker.AdamParams()).result()


@pytest.mark.parametrize(
    ("params", "error", "message"),
    [
        ({"temperature": -1.0}, "RequestFailedError", "temperature must be a finite number, at least 0"),
        ({"top_p": 0.0}, "RequestFailedError", "top_p must be above 0"),
        ({"top_k": 0}, "RequestFailedError", "top_k must be -1 or at least 1"),
        ({"max_tokens": 0}, "RequestFailedError", "max_tokens must be at least 1"),
        ({"stop": ""}, "RequestFailedError", "stop has an empty string"),
    ],
)
def test_invalid_sampling_parameters(served: Served, client: Any, params: dict[str, Any], error: str, message: str):
    sampling = client.create_sampling_client(base_model=served.model).result()
    with pytest.raises(getattr(tinker, error), match=message) as raised:
        sampling.sample(tinker.ModelInput.from_ints(IDS), 1, tinker.SamplingParams(**params)).result()
    assert raised.value.category == "user"


def test_invalid_prompts(served: Served, client: Any):
    sampling = client.create_sampling_client(base_model=served.model).result()
    params = tinker.SamplingParams(max_tokens=1)
    for ids, message in ([], "prompt has 0 tokens"), ([1] * 513, "prompt has 513 tokens"), ([9999], "0 to 579"):
        with pytest.raises(tinker.BadRequestError, match=message):
            sampling.sample(tinker.ModelInput.from_ints(ids), 1, params).result()
    with pytest.raises(tinker.RequestFailedError, match="leaves no room for an answer") as raised:
        sampling.sample(tinker.ModelInput.from_ints([1] * 512), 1, params).result()
    assert raised.value.category == "user"
    with pytest.raises(tinker.UnprocessableEntityError, match="num_samples"):
        sampling.sample(tinker.ModelInput.from_ints([1]), 0, params).result()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("create_session", "{", 422, "not a valid tinker request"),
        ("create_session", '{"tags": [], "colour": "red"}', 422, "colour: Extra inputs are not permitted"),
        ("create_model", "{}", 422, "session_id: Field required"),
        ("session_heartbeat", '{"session_id": "none"}', 404, "create a new ServiceClient"),
        ("asample", '{"prompt": {"chunks": []}, "sampling_params": {}}', 400, "set model_path or base_model"),
        ("nothing_like_it", "{}", 404, "this server has no POST /api/v1/nothing_like_it"),
        ("healthz", "{}", 405, "this server has no POST /api/v1/healthz"),
    ],
)
def test_malformed_requests(served: Served, path: str, body: str, status: int, message: str):
    answer = httpx.post(f"{served.url}/api/v1/{path}", content=body)
    assert answer.status_code == status
    assert message in answer.json()["detail"]


@pytest.mark.parametrize(
    "headers", [{"Host": "rebound.example"}, {"Origin": "http://evil.example"}, {"Sec-Fetch-Site": "cross-site"}]
)
def test_requests_of_web_pages_are_rejected(served: Served, headers: dict[str, str]):
    answer = httpx.post(f"{served.url}/api/v1/create_session", content='{"tags": []}', headers=headers)
    assert answer.status_code == 403


def test_telemetry_is_accepted_and_discarded(served: Served):
    answer = httpx.post(f"{served.url}/api/v1/telemetry", json={"events": [{"event": "x"}]})
    assert answer.json() == {"status": "accepted"}


def pieces(count: int, taken: list[int]) -> Any:
    for _ in range(count):
        taken.append(1)
        yield b"x" * 2**20


@pytest.mark.parametrize("route", ["forward_backward", "asample", "create_session", "no/such/route"])
def test_a_too_large_request_is_rejected_before_it_is_read(served: Served, route: str):
    declared: list[int] = []
    with httpx.Client() as http:
        url = f"{served.url}/api/v1/{route}"
        answer = http.post(url, content=pieces(200, declared), headers={"Content-Length": str(200 * 2**20)})
    assert answer.status_code == 413
    assert answer.json()["error"] == (
        "the request has 200.0 MiB; the limit of this server is 64 MiB; send fewer or shorter sequences in one "
        "request, or start the server with --max-body 200 or more"
    )
    assert len(declared) < 50


def test_a_request_without_a_length_is_rejected_when_it_becomes_too_large(served: Served):
    taken: list[int] = []
    with httpx.Client() as http:
        answer = http.post(f"{served.url}/api/v1/forward_backward", content=pieces(200, taken))
    assert answer.status_code == 413
    assert "MiB or more; the limit of this server is 64 MiB" in answer.json()["error"]
    assert "--max-body" in answer.json()["error"]
    assert len(taken) < 110


def test_the_client_splits_data_that_would_exceed_the_limit(base_model: BaseLanguageModel, tmp_path: Path):
    with serving(base_model, tmp_path, Limits(body_bytes=8192)) as served:
        training = served.client().create_lora_training_client(served.model, rank=2).result()
        data = [datum([1] * 200, weights=many(199)) for _ in range(6)]  # 6 x 3,200 bytes
        assert len(training.forward_backward(data, "cross_entropy").result().loss_fn_outputs) == 6
        long = datum([1] * 500, logprobs=many(499), advantages=many(499))
        with pytest.raises(tinker.APIStatusError, match=r"the limit of this server is .*--max-body 1 or more") as error:
            training.forward_backward([long], "ppo").result()
        assert error.value.status_code == 413
        training.optim_step(tinker.AdamParams()).result()


@pytest.mark.parametrize(
    ("message", "status", "text"),
    [
        (b"\xff\xff", 422, "not a ForwardBackwardRequest of tinker 0.38"),
        (message(dtype=4), 400, r"target_tokens has dtype 4; this server takes 1 \(float32\) and 2 \(int64\)"),
        (message(dense=b"123"), 400, "target_tokens has 3 bytes; expected a multiple of 8"),
        (message(chunk=b"12345"), 400, "model_input has 5 bytes; expected a multiple of 4"),
    ],
)
def test_malformed_protobuf(served: Served, message: bytes, status: int, text: str):
    headers = {"Content-Type": "application/x-protobuf"}
    answer = httpx.post(f"{served.url}/api/v1/forward_backward", content=message, headers=headers)
    assert answer.status_code == status
    assert re.search(text, answer.json()["detail"])


def test_bodies_that_are_read_at_once_are_limited(served: Served):
    """Five requests of 60 MiB, none of which is complete: the last is rejected."""
    host, port = served.url.removeprefix("http://").split(":")
    head = f"POST /api/v1/asample HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: {60 * 2**20}\r\n\r\n".encode()
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            connection = stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
            connection.sendall(head)
            with contextlib.suppress(ConnectionError):
                connection.sendall(b"x" * (59 * 2**20))
        assert b" 503 " in connection.recv(4096)
    with httpx.Client() as http:
        assert http.get(f"{served.url}/api/v1/healthz").status_code == 200


def test_large_headers_are_rejected(served: Served):
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"x" * 2**20)
        assert b" 400 " in connection.recv(4096)
