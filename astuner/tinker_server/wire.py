"""The JSON requests of tinker 0.20 to 0.38, and the error for invalid ones. Unknown fields are rejected.

The types of the client package are not used: `tinker` is not a dependency of astuner, and its `Datum`, `TensorData` and
`ForwardBackwardInput` do not validate JSON.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from astuner.errors import AstunerError


class TinkerRequestError(AstunerError):
    """A request that the server rejects.

    Attributes:
        status: the HTTP status. The client retries 408, 409, 429 and 5xx for minutes, so these are used only if a retry
            can succeed.
    """

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f.][^/\x00-\x1f]*$")]
"""A checkpoint's name: one component of its path."""


class WireModel(BaseModel):
    """Base class of all requests."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str | None = None


class TokenChunk(WireModel):
    """A part of a sequence. Unknown fields are ignored, so that images get a specific error message."""

    model_config = ConfigDict(extra="ignore")
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(WireModel):
    """A token sequence in chunks."""

    chunks: list[TokenChunk]

    @property
    def ids(self) -> list[int]:
        """All token ids; `TinkerRequestError` if a chunk is not text."""
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise TinkerRequestError(
                    f"the request has a chunk of type {chunk.type!r}; this server takes encoded_text only"
                )
        return [token for chunk in self.chunks for token in chunk.tokens]


class TensorData(WireModel):
    """A flattened dense tensor. The sparse fields are parsed only for a specific error message."""

    data: list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Datum(WireModel):
    """A sequence with the inputs of the loss."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class ForwardBackwardInput(WireModel):
    """The data and the loss of a forward or forward-backward request."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float | str] | None = None


class ModelRequest(WireModel):
    """A request to a model; `seq_id` is the client's sequence number."""

    model_id: str
    seq_id: int | None = None


class ForwardRequest(ModelRequest):
    """Compute log-probabilities and the loss."""

    forward_input: ForwardBackwardInput


class ForwardBackwardRequest(ModelRequest):
    """Compute log-probabilities and the loss, and accumulate the gradient."""

    forward_backward_input: ForwardBackwardInput


class AdamParams(WireModel):
    """The optimizer's hyperparameters for one step."""

    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStepRequest(ModelRequest):
    """Take an optimizer step with the accumulated gradient."""

    adam_params: AdamParams


class SaveWeightsRequest(ModelRequest):
    """Save the weights and the optimizer's state."""

    path: Name
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveWeightsForSamplerRequest(ModelRequest):
    """Save weights to sample from. If the request has no name, a sampling session is created for them, too.

    With the kind `inflight`, all earlier inflight sampling sessions of the model sample from these weights, too.
    """

    path: Name | None = None
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    sampling_session_seq_id: int | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    user_metadata: dict[str, str] | None = None


class OptimizerConfig(WireModel):
    """The optimizer of a model."""

    type: Literal["adamw"] = "adamw"


class LoadWeightsRequest(WireModel):
    """Load a checkpoint, with or without the optimizer's state.

    A request with `model_id` loads it into that model, and one with `session_id` and `model_seq_id` into a new model.
    """

    model_id: str | None = None
    seq_id: int | None = None
    session_id: str | None = None
    model_seq_id: int | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    path: str
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None
    weights_access_token: str | None = None

    @model_validator(mode="after")
    def _check_target(self) -> LoadWeightsRequest:
        if (self.model_id is None) == (self.session_id is None or self.model_seq_id is None):
            raise ValueError("set model_id to load into a model, or session_id and model_seq_id to create one")
        return self


class ModelIdRequest(WireModel):
    """`get_info` or `unload_model`."""

    model_id: str


class LoraSettings(WireModel):
    """The adapters of a model; rank 0 trains all weights."""

    rank: Annotated[int, Field(ge=0)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(WireModel):
    """Create a model, which starts a training run."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings | None = None
    optimizer_config: OptimizerConfig | None = None


class CreateSessionRequest(WireModel):
    """Create a client session."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class SessionRequest(WireModel):
    """Keep a client session open (`session_heartbeat`)."""

    session_id: str


class CreateSamplingSessionRequest(WireModel):
    """Create a sampling session for the base model or a checkpoint."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingOptions(WireModel):
    """Sampling parameters; the engine checks their ranges."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(WireModel):
    """Sample completions of a prompt."""

    prompt: ModelInput
    sampling_params: SamplingOptions
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: Annotated[int, Field(ge=1)] | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    target_prompt_logprobs: TensorData | None = None
    prompt_alt_tokens_k: Annotated[int, Field(ge=0, le=1024)] = 0
    record_stability_info: bool | None = None


class RequestIdRequest(WireModel):
    """Cancel a sampling request (`cancel_future`)."""

    request_id: str


class FinishRequest(WireModel):
    """End a client session."""

    reason: dict[str, Any] = {}
    detail: str | None = None


class RetrieveRequest(WireModel):
    """Retrieve the result of a request. `allow_metadata_only` is ignored; results are always complete."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfoRequest(WireModel):
    """Get the training run's settings of a checkpoint."""

    tinker_path: str


class TtlRequest(WireModel):
    """Set a checkpoint's time to live; None for no expiry."""

    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
