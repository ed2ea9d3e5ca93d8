"""Estimates the memory on each GPU of a described machine, for `astuner check --machine`.

The estimates assume samples of the maximum length. They are compared with traces of the same computation on fake
tensors in tests/backbone/test_memory_plan.py.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from astuner.algorithms.credit_assignment import uses_kl_loss
from astuner.backbone.base import MemoryPart
from astuner.backbone.memory.estimate import (
    CUDA_CONTEXT,
    SMALLER_MODEL,
    ModelShape,
    divided,
    kept_bytes,
    model_shape,
)
from astuner.backbone.packing.attention import undivided_heads
from astuner.backbone.training.trainer_section import leaves
from astuner.config.keys import KeyPath, dotted
from astuner.config.root import AstunerConfig, RunConfig
from astuner.errors import ConfigError
from astuner.system.gpus import Machine

SYNC_BUFFER = 2048 * 2**20
"""Bytes of verl's buffer for weights on their way to the engine (`update_weights_bucket_megabytes`)."""
# [tokens, vocabulary] tensors that are alive together: log-probabilities and two gradients; without gradient, logits
# and log-probabilities.
_BACKWARD_LOGITS, _FORWARD_LOGITS = 3, 2
# FSDP gathers the weights of the next layer while it computes one.
_GATHERED_LAYERS = 2

_SHARD = "use more GPUs (trainer_common.n_gpus_per_node, nnodes), or train adapters (model.lora.rank: 16)"
_PARAM_OFFLOAD = "set trainer_common.fsdp_config.param_offload: True"
_OPTIMIZER_OFFLOAD = "set trainer_common.fsdp_config.optimizer_offload: True"
_MICRO_BATCH = (
    "lower trainer_common.max_tokens_per_micro_batch and rollout.max_model_len, or raise "
    "trainer_common.ulysses_sequence_parallel_size"
)
_CHECKPOINTING = "set model.gradient_checkpointing: True"
ENGINE_SHARE = "lower rollout.gpu_memory_utilization"
# The attention with which activations are counted, and the tokens of the shortest of three forward passes.
_COUNTED_ATTENTION = "astuner_counted"
_COUNTED_TOKENS = 32


class _FlashAttention(torch.autograd.Function):
    """Keeps for the backward pass what flash-attention keeps (arXiv:2307.08691); computes nothing."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = torch.empty_like(query)
        log_sum = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, log_sum)
        return output


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_: Any
) -> tuple[Tensor, None]:
    output: Tensor = _FlashAttention.apply(query, key, value)  # type: ignore[no-untyped-call]
    return output.transpose(1, 2), None


def activation_bytes(model_path: str, dtype: torch.dtype, *, autocast: bool) -> float | None:
    """Return the bytes per token that the backward pass needs in a model without adapters, excluding the logits.

    Args:
        model_path: a folder with config.json, or a Hugging Face name.
        autocast: whether the weights are in float32 and computations are cast, as on the local backbone; otherwise
            all weights have the dtype, as FSDP casts them.

    Returns:
        None for architectures that cannot run on fake tensors.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_COUNTED_ATTENTION, _attention)
    shape = AutoConfig.from_pretrained(model_path)
    shape._attn_implementation = _COUNTED_ATTENTION
    # Some architectures have operations that fake tensors lack, or their own attention, with errors of various types.
    with contextlib.suppress(Exception), FakeTensorMode():
        model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32 if autocast else dtype)
        cast = torch.autocast("cpu", dtype) if autocast and dtype != torch.float32 else contextlib.nullcontext()
        with cast:
            first, second, third = (
                kept_bytes(model, torch.zeros((1, number * _COUNTED_TOKENS), dtype=torch.int64)) for number in (1, 2, 3)
            )
        # The derivative at length 0 of a quadratic function, which leaves out copies of weights and masks.
        return (-5 * first + 8 * second - 3 * third) / (2 * _COUNTED_TOKENS)
    return None


def gpu_model_shape(config: AstunerConfig, model_path: str, machine: Machine, *, autocast: bool) -> ModelShape:
    """Return the model's shape on one of the machine's GPUs; `autocast` is as in `activation_bytes`.

    ModelError: it has no readable configuration, or lacks the target modules of LoRA. ConfigError: the engines' or
    Ulysses' parallelism cannot divide the attention heads of the model.
    """
    shape = model_shape(config, model_path, torch.device("cuda"))
    for _, text in undivided_heads(config, getattr(shape.text, "num_attention_heads", 0)):
        raise ConfigError(text)
    counted = None if config.model.lora.rank else activation_bytes(model_path, shape.dtype, autocast=autocast)
    return replace(shape, counted=counted, memory=machine.memory)


@dataclass(frozen=True)
class ShardedTrainer:
    """verl's FSDP workers, which train for the verl backbone and for Trinity, with weights sharded over some GPUs."""

    config: AstunerConfig
    shape: ModelShape
    gpus: int
    reference_gpus: int

    @property
    def tokens(self) -> int:
        """Tokens of the largest micro-batch on one GPU."""
        common = self.config.trainer_common
        share = -(-max_length(self.config, self.shape) // common.ulysses_sequence_parallel_size)
        return max(common.max_tokens_per_micro_batch, share)

    @property
    def weights(self) -> MemoryPart:
        """Shards of the weights, in float32."""
        fix = f"{_PARAM_OFFLOAD}, or {SMALLER_MODEL}"
        return MemoryPart("weights", divided(self.shape.parameters * 4, self.gpus), fix)

    @property
    def optimizer(self) -> MemoryPart:
        """Shards of AdamW's moments."""
        return MemoryPart("optimizer (AdamW)", divided(self.shape.trained * 8, self.gpus), _SHARD)

    @property
    def resting(self) -> list[MemoryPart]:
        """What stays on the GPU while the trainer waits."""
        offload, parts = self.config.trainer_common.fsdp_config, []
        if not offload.param_offload:
            parts.append(self.weights)
        if not offload.optimizer_offload:
            parts.append(replace(self.optimizer, fix=_OPTIMIZER_OFFLOAD))
        return parts + self._reference

    @property
    def _reference(self) -> list[MemoryPart]:
        config, shape = self.config, self.shape
        is_used = uses_kl_loss(config) or config.trainer_common.algorithm.use_kl_in_reward
        size = (
            0 if config.model.lora.rank or not is_used else divided(shape.parameters * shape.width, self.reference_gpus)
        )
        fix = "set trainer_common.use_kl_loss: False, or train adapters, which need no copy"
        return [MemoryPart("reference model", size, fix)] if size else []

    @property
    def gathered(self) -> MemoryPart:
        """The embedding weights and the layers that FSDP has gathered."""
        layers = _GATHERED_LAYERS * self._layer if self.gpus > 1 else self._layer
        return MemoryPart("gathered weights", (self._head + layers) * self.shape.width, SMALLER_MODEL)

    @property
    def _layer(self) -> int:
        return self.shape.layer_parameters // int(self.shape.text.num_hidden_layers)

    @property
    def _head(self) -> int:
        return int(self.shape.text.hidden_size) * int(self.shape.text.vocab_size)

    def _logits(self, copies: int) -> MemoryPart:
        size = self.tokens * self.shape.text.vocab_size * self.shape.width * copies
        return MemoryPart("logits of a micro-batch", size, _MICRO_BATCH)

    def _activations(self) -> tuple[MemoryPart, MemoryPart]:
        """Return the activations that all layers keep, and those of the layer that is computed."""
        shape, is_checkpointed = self.shape, self.config.model.gradient_checkpointing
        layers = int(shape.text.num_hidden_layers)
        in_layer = int(self.tokens * shape.activation_bytes / layers)
        kept = self.tokens * shape.text.hidden_size * shape.width * layers if is_checkpointed else in_layer * layers
        fix = _MICRO_BATCH if is_checkpointed else f"{_CHECKPOINTING}, or {_MICRO_BATCH}"
        return (
            MemoryPart("activations of a micro-batch", kept, fix),
            MemoryPart("activations of one layer", in_layer, _MICRO_BATCH),
        )

    @property
    def update(self) -> list[MemoryPart]:
        """Parts of the phase that computes gradients."""
        kept, layer = self._activations()
        # A layer's gradients, in the dtype of the computation and in float32 to be reduced, exist without the logits.
        reduced = MemoryPart("gradients being reduced", self._layer * (self.shape.width + 4), SMALLER_MODEL)
        logits = self._logits(_BACKWARD_LOGITS)
        moments = [[logits], [layer, reduced] if self.config.model.gradient_checkpointing else [reduced]]
        return [
            replace(self.weights, fix=_SHARD),
            MemoryPart("gradients", divided(self.shape.trained * 4, self.gpus), _SHARD),
            self.optimizer,
            *self._reference,
            self.gathered,
            kept,
            *max(moments, key=lambda parts: sum(part.size for part in parts)),
        ]

    @property
    def log_probs(self) -> list[MemoryPart]:
        """Parts of the phase that computes log-probabilities."""
        _, layer = self._activations()
        resting = [part for part in self.resting if part.name != self.weights.name]
        largest = max(self._logits(_FORWARD_LOGITS), layer, key=lambda part: part.size)
        return [replace(self.weights, fix=_SHARD), *resting, self.gathered, largest]

    @property
    def sync(self) -> list[MemoryPart]:
        """Parts of the phase that sends the weights to the engine, without the engine."""
        resting = [part for part in self.resting if part.name != self.weights.name]
        buffer = MemoryPart("buffers of the weight sync", SYNC_BUFFER + self._head * 4, SMALLER_MODEL)
        return [replace(self.weights, fix=_SHARD), *resting, buffer]

    @property
    def checkpoint(self) -> list[MemoryPart]:
        """Parts of the phase that saves or loads a checkpoint."""
        whole = MemoryPart("one whole weight", self._head * 4, SMALLER_MODEL)
        return [replace(self.weights, fix=_SHARD), self.optimizer, *self._reference, whole]

    @property
    def host(self) -> int:
        """Bytes in main memory for one GPU's offloaded shards."""
        offload = self.config.trainer_common.fsdp_config
        return self.weights.size * offload.param_offload + self.optimizer.size * offload.optimizer_offload


def planned_run(config: RunConfig, machine: Machine) -> RunConfig:
    """Return the configuration for the described machines, one Ray cluster; ConfigError: they have too few GPUs."""
    common = config.astuner.trainer_common
    asked = common.n_gpus_per_node
    if asked is not None and asked > machine.gpus:
        raise ConfigError(
            f"astuner.trainer_common.n_gpus_per_node is {asked}, and --machine has {machine.gpus} GPUs; write "
            f"{machine.gpus} or less, or describe another machine"
        )
    changes: dict[str, object] = {"device": "cuda", "n_gpus_per_node": asked or machine.gpus}
    if common.nnodes > 1:
        changes["ray_address"] = common.ray_address or "auto"
    changed = config.astuner.model_copy(update={"trainer_common": common.model_copy(update=changes)})
    return config.model_copy(update={"astuner": changed})


def fsdp_shards(section: object, path: KeyPath, gpus: int) -> int:
    """Return among how many GPUs verl shards a model: `fsdp_size`, or all `gpus` of the trainer.

    `path` names the section and the key. ConfigError: `fsdp_size` is not a number that divides the GPUs.
    """
    values = [value for found, value in leaves(section) if found == path[1:]]
    size = values[-1] if values else -1
    if not isinstance(size, int) or (0 <= size < gpus and (size == 0 or gpus % size)):
        raise ConfigError(
            f"{dotted(path)} is {size!r}; expected a number of GPUs that divides the trainer's {gpus}, or -1 for all"
        )
    return size if 0 < size < gpus else gpus


def max_length(config: AstunerConfig, shape: ModelShape) -> int:
    """Return the longest sample's tokens: max_model_len, limited to the model's number of positions."""
    positions = getattr(shape.text, "max_position_embeddings", None) or config.rollout.max_model_len
    return min(config.rollout.max_model_len, int(positions))


def engine_parts(
    config: AstunerConfig, shape: ModelShape, machine: Machine, default_share: float
) -> tuple[list[MemoryPart], tuple[str, ...]]:
    """Return an engine's memory parts on one GPU, and what does not fit into its share of the GPU."""
    size, share = config.rollout.tensor_model_parallel_size, config.rollout.gpu_memory_utilization or default_share
    budget = int(machine.memory * share)
    weights = divided(shape.parameters * shape.width, size)
    kv = shape.kv
    sequence = max_length(config, shape) * kv.bytes_per_token // min(size, max(kv.heads, 1))
    cache = max(budget - weights, sequence)
    parts = [
        MemoryPart("engine: weights", weights, "raise rollout.tensor_model_parallel_size"),
        MemoryPart("engine: key-value cache", cache, ENGINE_SHARE),
    ]
    if weights + sequence <= budget:
        return parts, ()
    text = (
        f"an engine has {budget / 2**30:.1f} GiB of each GPU (rollout.gpu_memory_utilization: {share:g}), and its "
        f"weights ({weights / 2**30:.1f} GiB) and one sequence of rollout.max_model_len ({sequence / 2**30:.1f} GiB) "
        "need more; raise rollout.gpu_memory_utilization or rollout.tensor_model_parallel_size"
    )
    return parts, (text,)


def cuda_contexts(processes: int) -> MemoryPart:
    """Return the memory that several processes' CUDA contexts take on a GPU."""
    return MemoryPart("CUDA contexts and kernels", processes * CUDA_CONTEXT, "use another GPU")
