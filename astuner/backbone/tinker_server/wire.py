"""The requests of tinker 0.20, as it sends them: JSON, unknown fields refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from astuner.backbone.tinker_server.refusal import Refusal

Name = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f.][^/\x00-\x1f]*$")]
"""A checkpoint's name: one component of its path."""


class Wire(BaseModel):
    """What all requests have."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=())
    type: str | None = None


class Chunk(Wire):
    """A part of a sequence. Images are parsed far enough to be refused by name."""

    model_config = ConfigDict(extra="ignore")
    type: str = "encoded_text"
    tokens: list[int] = []


class ModelInput(Wire):
    """A sequence of tokens in parts."""

    chunks: list[Chunk]

    @property
    def ids(self) -> list[int]:
        """All token ids.

        Raises:
            Refusal: a part is no text.
        """
        for chunk in self.chunks:
            if chunk.type != "encoded_text":
                raise Refusal(f"a chunk of type {chunk.type!r} was sent; this server takes encoded_text only")
        return [token for chunk in self.chunks for token in chunk.tokens]


class TensorData(Wire):
    """A dense tensor, flattened. Sparse ones have more fields, which are parsed to be refused by name."""

    data: list[float]
    dtype: Literal["int64", "float32"]
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class Datum(Wire):
    """A sequence, and what the loss needs for it."""

    model_input: ModelInput
    loss_fn_inputs: dict[str, TensorData]


class ForwardBackwardInput(Wire):
    """Data and loss of one pass."""

    data: list[Datum]
    loss_fn: str
    loss_fn_config: dict[str, float] | None = None


class ModelRequest(Wire):
    """A request to a model; `seq_id` numbers the client's requests to it."""

    model_id: str
    seq_id: int | None = None


class ForwardRequest(ModelRequest):
    """Compute log-probabilities and the loss."""

    forward_input: ForwardBackwardInput


class ForwardBackwardRequest(ModelRequest):
    """Compute them, and add the gradient to what is accumulated."""

    forward_backward_input: ForwardBackwardInput


class AdamParams(Wire):
    """The optimiser's numbers, which may change from step to step."""

    learning_rate: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-4
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    eps: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 1e-12
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    grad_clip_norm: Annotated[float, Field(ge=0)] = 0.0


class OptimStepRequest(ModelRequest):
    """Move the weights by the accumulated gradient."""

    adam_params: AdamParams


class SaveWeightsRequest(ModelRequest):
    """Write weights and optimiser."""

    path: Name | None = None
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    overwrite: bool = False


class SaveWeightsForSamplerRequest(ModelRequest):
    """Write weights to sample from; without a name, as those of a new sampling session."""

    path: Name | None = None
    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
    sampling_session_seq_id: int | None = None


class LoadWeightsRequest(ModelRequest):
    """Take weights back, with or without the optimiser."""

    path: str
    optimizer: bool
    weights_access_token: str | None = None


class ModelIdRequest(Wire):
    """get_info, unload_model."""

    model_id: str


class LoraSettings(Wire):
    """The adapters that a client asks for; rank 0 trains all weights."""

    rank: Annotated[int, Field(ge=0)]
    seed: int | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class CreateModelRequest(Wire):
    """Begin a training run."""

    session_id: str
    model_seq_id: int
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraSettings | None = None


class CreateSessionRequest(Wire):
    """A client says hello."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None


class SessionRequest(Wire):
    """session_heartbeat."""

    session_id: str


class CreateSamplingSessionRequest(Wire):
    """Choose what to sample from."""

    session_id: str
    sampling_session_seq_id: int
    base_model: str | None = None
    model_path: str | None = None


class SamplingParams(Wire):
    """How to sample; ranges are checked by the engine."""

    max_tokens: int | None = None
    seed: int | None = None
    stop: str | list[int] | list[str] | None = None
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0


class SampleRequest(Wire):
    """Sample after a prompt."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: Annotated[int, Field(ge=1, le=1024)] = 1
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: str | None = None
    seq_id: int | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0


class RetrieveRequest(Wire):
    """Ask for a future's result. Results are sent whole, whatever `allow_metadata_only` says."""

    request_id: str
    allow_metadata_only: bool = False


class WeightsInfoRequest(Wire):
    """Ask what a checkpoint is of."""

    tinker_path: str


class TtlRequest(Wire):
    """Give a checkpoint a time to live, or (None) take it away."""

    ttl_seconds: Annotated[int, Field(gt=0)] | None = None
