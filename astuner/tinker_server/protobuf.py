"""The protobuf messages in tinker 0.38: the data for forward passes, and the results from passes and samples.

Clients of 0.38 send `forward_backward` as protobuf, and accept these two result types only as protobuf. Clients of 0.20
send JSON, and accept both. The fields and their numbers are those of the client's `tinker_public.proto`. Arrays are the
bytes of a little-endian numpy array.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from astuner.tinker_server import wire
from astuner.tinker_server.wire import TinkerRequestError

MEDIA_TYPE = "application/x-protobuf"
_FIELD_TYPES = ("bool", "bytes", "double", "int32", "int64", "string")
# Fields by name with number and type; `*` marks a repeated field. A map is a repeated message with a key and a value,
# and an enumeration is an int32.
_MESSAGES: Mapping[str, Mapping[str, tuple[int, str]]] = {
    "TopkLogprobs": {"token_ids": (1, "bytes"), "logprobs": (2, "bytes"), "k": (3, "int32"), "length": (4, "int32")},
    "SampledSequence": {
        "stop_reason": (1, "int32"),
        "tokens": (2, "bytes"),
        "logprobs": (3, "bytes"),
        "topk_sampled_logprobs": (4, "TopkLogprobs"),
    },
    "SparseCsr": {"values": (1, "bytes"), "crow_indices": (2, "bytes"), "col_indices": (3, "bytes")},
    "Tensor": {
        "dense": (1, "bytes"),
        "sparse_csr": (2, "SparseCsr"),
        "dtype": (3, "int32"),
        "shape": (4, "int64*"),
    },
    "PromptAltTokens": {"tokens": (1, "Tensor"), "logprobs": (2, "Tensor")},
    "SampleResponse": {
        "sequences": (1, "SampledSequence*"),
        "prompt_logprobs": (2, "bytes"),
        "topk_prompt_logprobs": (3, "TopkLogprobs"),
        "target_prompt_logprobs": (5, "Tensor"),
        "prompt_alt_tokens": (6, "PromptAltTokens"),
    },
    "BatchedTensor": {"data": (1, "bytes"), "offsets": (2, "bytes"), "dtype": (3, "int32")},
    "FieldsEntry": {"key": (1, "string"), "value": (2, "BatchedTensor")},
    "ArrayRecord": {"fields": (2, "FieldsEntry*"), "num_datums": (3, "int64")},
    "NumberEntry": {"key": (1, "string"), "value": (2, "double")},
    "ConfigValue": {"number": (1, "double"), "text": (2, "string")},
    "ConfigEntry": {"key": (1, "string"), "value": (2, "ConfigValue")},
    "ForwardBackwardOutput": {
        "loss_fn_output_type": (1, "string"),
        "loss_fn_outputs": (2, "ArrayRecord*"),
        "metrics": (3, "NumberEntry*"),
    },
    "EncodedTextChunk": {"tokens": (1, "bytes")},
    "OtherChunk": {},
    "Chunk": {"encoded_text": (1, "EncodedTextChunk"), "image": (2, "OtherChunk"), "dmel": (3, "OtherChunk")},
    "TensorEntry": {"key": (1, "string"), "value": (2, "Tensor")},
    "Datum": {"model_input": (1, "Chunk*"), "loss_fn_inputs": (2, "TensorEntry*")},
    "ForwardBackwardRequest": {
        "model_id": (1, "string"),
        "seq_id": (2, "int32"),
        "data": (3, "Datum*"),
        "loss_fn": (4, "string"),
        "forward_only": (6, "bool"),
        "loss_fn_config_v2": (7, "ConfigEntry*"),
    },
}
_STOP_REASONS = {"stop": 0, "length": 1}
_DTYPES: Mapping[int, tuple[Literal["float32", "int64"], str]] = {1: ("float32", "<f4"), 2: ("int64", "<i8")}
_FLOAT32, _INT64 = 1, 2
_MASKED_LOGPROB = -99999.0
"""The log-probability of empty cells in a table with top log-probabilities."""


def _message_types() -> dict[str, Any]:
    kinds = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="astuner_tinker.proto", package="astuner_tinker", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, (number, declared) in fields.items():
            added = message.field.add(name=field, number=number)
            added.label = kinds.LABEL_REPEATED if declared.endswith("*") else kinds.LABEL_OPTIONAL
            kind = declared.removesuffix("*")
            if kind in _FIELD_TYPES:
                added.type = getattr(kinds, f"TYPE_{kind.upper()}")
            else:
                added.type, added.type_name = kinds.TYPE_MESSAGE, f".astuner_tinker.{kind}"
    # A pool of its own: the client may be loaded in the same process.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    find = pool.FindMessageTypeByName
    return {name: message_factory.GetMessageClass(find(f"astuner_tinker.{name}")) for name in _MESSAGES}


_TYPES = _message_types()


def parse_forward_backward(body: bytes) -> wire.ForwardRequest | wire.ForwardBackwardRequest:
    """Parse the body of a forward-backward request, or a forward request's, which is sent to the same route.

    Raises:
        TinkerRequestError: the body is not such a message, or an array in it is incomplete.
    """
    message = _TYPES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise TinkerRequestError(
            f"the body is not a ForwardBackwardRequest of tinker 0.38 in protobuf ({error}); send JSON as "
            "application/json",
            422,
        ) from error
    # The types of a message are checked by protobuf; a second validation would cost more than the parsing.
    rows = [
        wire.Datum.model_construct(
            model_input=wire.ModelInput.model_construct(chunks=[_chunk(chunk) for chunk in item.model_input]),
            loss_fn_inputs={entry.key: _tensor_data(entry.key, entry.value) for entry in item.loss_fn_inputs},
        )
        for item in message.data
    ]
    data = wire.ForwardBackwardInput.model_construct(
        data=rows,
        loss_fn=message.loss_fn,
        loss_fn_config={entry.key: entry.value.text or entry.value.number for entry in message.loss_fn_config_v2},
    )
    model: dict[str, Any] = {"model_id": message.model_id, "seq_id": message.seq_id or None}
    if message.forward_only:
        return wire.ForwardRequest.model_construct(**model, forward_input=data)
    return wire.ForwardBackwardRequest.model_construct(**model, forward_backward_input=data)


def _chunk(message: Any) -> wire.TokenChunk:
    kind = next((kind for kind in ("encoded_text", "image", "dmel") if message.HasField(kind)), "unknown")
    ids = _numbers("model_input", message.encoded_text.tokens, "<i4") if kind == "encoded_text" else []
    return wire.TokenChunk.model_construct(type=kind, tokens=ids)


def _tensor_data(key: str, message: Any) -> wire.TensorData:
    if message.dtype not in _DTYPES:
        raise TinkerRequestError(f"{key} has dtype {message.dtype}; this server takes 1 (float32) and 2 (int64)")
    dtype, format_code = _DTYPES[message.dtype]
    is_sparse, rows = message.HasField("sparse_csr"), message.sparse_csr
    return wire.TensorData.model_construct(
        data=_numbers(key, rows.values if is_sparse else message.dense, format_code),
        dtype=dtype,
        shape=list(message.shape) or None,
        sparse_crow_indices=_numbers(key, rows.crow_indices, "<i8") if is_sparse else None,
        sparse_col_indices=_numbers(key, rows.col_indices, "<i8") if is_sparse else None,
    )


def _numbers(field: str, data: bytes, format_code: str) -> list[Any]:
    size = np.dtype(format_code).itemsize
    if len(data) % size:
        raise TinkerRequestError(f"{field} has {len(data)} bytes; expected a multiple of {size}")
    numbers: list[Any] = np.frombuffer(data, format_code).tolist()
    return numbers


def encode_forward_backward(result: Mapping[str, Any]) -> bytes:
    """Return the result of a forward pass as the message ForwardBackwardOutput."""
    outputs: Sequence[Mapping[str, Any]] = result["loss_fn_outputs"]
    message = _TYPES["ForwardBackwardOutput"](loss_fn_output_type=result["loss_fn_output_type"])
    for name, value in result["metrics"].items():
        message.metrics.add(key=name, value=value)
    record = message.loss_fn_outputs.add(num_datums=len(outputs))
    for name in outputs[0] if outputs else ():
        arrays = [np.asarray(output[name]["data"], "<f4") for output in outputs]
        offsets = np.cumsum([0, *(array.nbytes for array in arrays)], dtype="<i8")
        entry = record.fields.add(key=name)
        entry.value.data, entry.value.offsets = np.concatenate(arrays).tobytes(), offsets.tobytes()
        entry.value.dtype = _FLOAT32
    encoded: bytes = message.SerializeToString()
    return encoded


def encode_samples(result: Mapping[str, Any]) -> bytes:
    """Return the result of a sampling request as the message SampleResponse.

    Raises:
        ValueError: a log-probability of a sample is not finite.
    """
    message = _TYPES["SampleResponse"]()
    for sequence in result["sequences"]:
        added = message.sequences.add(stop_reason=_STOP_REASONS[sequence["stop_reason"]])
        added.tokens = np.asarray(sequence["tokens"], "<i4").tobytes()
        logprobs = np.asarray(sequence["logprobs"], "<f4")
        if not np.isfinite(logprobs).all():
            raise ValueError("log-probabilities of a sample are not finite")
        added.logprobs = logprobs.tobytes()
        if "topk_logprobs" in sequence:
            _set_top_logprobs(added.topk_sampled_logprobs, sequence["topk_logprobs"])
    if "prompt_logprobs" in result:
        scores = [math.nan if value is None else value for value in result["prompt_logprobs"]]
        message.prompt_logprobs = np.asarray(scores, "<f4").tobytes()
    if "topk_prompt_logprobs" in result:
        _set_top_logprobs(message.topk_prompt_logprobs, result["topk_prompt_logprobs"])
    if "target_prompt_logprobs" in result:
        _set_tensor(message.target_prompt_logprobs, result["target_prompt_logprobs"])
    if "prompt_alt_tokens" in result:
        _set_tensor(message.prompt_alt_tokens.tokens, result["prompt_alt_tokens"]["tokens"])
        _set_tensor(message.prompt_alt_tokens.logprobs, result["prompt_alt_tokens"]["logprobs"])
    encoded: bytes = message.SerializeToString()
    return encoded


def _set_top_logprobs(message: Any, rows: Sequence[Sequence[tuple[int, float]] | None]) -> None:
    width = max((len(row or ()) for row in rows), default=0)
    ids = np.zeros((len(rows), width), "<i4")
    logprobs = np.full((len(rows), width), _MASKED_LOGPROB, "<f4")
    for place, row in enumerate(rows):
        for rank, (token, logprob) in enumerate(row or ()):
            ids[place, rank], logprobs[place, rank] = token, logprob
    message.token_ids, message.logprobs = ids.tobytes(), logprobs.tobytes()
    message.k, message.length = width, len(rows)


def _set_tensor(message: Any, tensor: Mapping[str, Any]) -> None:
    format_code = "<f4" if tensor["dtype"] == "float32" else "<i8"
    message.dtype = _FLOAT32 if tensor["dtype"] == "float32" else _INT64
    message.shape.extend(tensor["shape"])
    values = np.asarray(tensor["data"], format_code).tobytes()
    if tensor.get("sparse_crow_indices") is None:
        message.dense = values
        return
    message.sparse_csr.values = values
    message.sparse_csr.crow_indices = np.asarray(tensor["sparse_crow_indices"], "<i8").tobytes()
    message.sparse_csr.col_indices = np.asarray(tensor["sparse_col_indices"], "<i8").tobytes()
