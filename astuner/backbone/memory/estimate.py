"""Estimates a run's peak memory from its model's shape, without loading weights.

Before an agent runs, the lengths of its prompts and answers are not known. The estimate assumes answers with half the
maximum length, and prompts as long as the tasks' own texts, without system prompts and tool output. If a step fills its
micro-batches, these lengths matter little.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch

from astuner.backbone.base import MemoryEstimate, MemoryPart
from astuner.backbone.training.episode_placement import uses_workers
from astuner.backbone.training.lora import with_lora
from astuner.backbone.training.run_inputs import RunInputs, validation_repeats
from astuner.config.root import AstunerConfig
from astuner.errors import AstunerError, ModelError
from astuner.llm_engine.causal_lm import choose_device, compute_dtype
from astuner.llm_engine.cpu_linear import is_packed
from astuner.llm_engine.embedded import fast_forward
from astuner.llm_engine.embedded.forward import KvShape
from astuner.llm_engine.embedded.kv_store import default_lane_tokens, default_prefix_cache_tokens

# What a process with PyTorch gains after its imports: further imports, threads with their stacks, kernels and buffers.
_RUNTIME = 110 * 2**20
CUDA_CONTEXT = 600 * 2**20
"""Bytes of a CUDA context with PyTorch's kernels and workspaces."""
# An episode in the main process: its objects, and a Python int in several tuples for each of its tokens.
_EPISODE, _EPISODE_TOKEN = 20_000, 66
# Bytes of the process from which episode workers are forked, and of what a worker does not share with it. The user's
# code is not included.
_FORK_SERVER, _EPISODE_PROCESS = 250 * 2**20, 25 * 2**20
# Tokens of the shorter of two forward passes whose activations are counted.
_COUNTED_TOKENS = 32
# Hidden states that a layer keeps per token for the backward pass, for models whose activations cannot be counted.
# Other models keep 13 to 33.
_KEPT_PER_LAYER = 28
_PROMPTS = 16

SMALLER_MODEL = "use a smaller model.path"
_CACHE = "lower rollout.max_num_seqs or rollout.max_env_worker"


@dataclass(frozen=True)
class BatchShape:
    """Numbers of tokens in a training step.

    Attributes:
        answer: trained tokens of a sample, on average.
        longest: tokens of the longest sample.
        episodes: maximum number of concurrent episodes in the process, in training or in validation.
        concurrent: episodes that run at the same time.
    """

    groups: int
    rows: int
    prompt: int
    answer: int
    longest: int
    episodes: int
    concurrent: int

    @property
    def row(self) -> int:
        """Tokens of a sample."""
        return self.prompt + self.answer

    @property
    def distinct(self) -> int:
        """Tokens of a mini-batch in which every prompt counts once."""
        return self.groups * self.prompt + self.rows * self.answer

    @staticmethod
    def of(config: AstunerConfig, run_inputs: RunInputs) -> BatchShape:
        """Return the shape of one step in the run."""
        common, rollout, tasks = config.trainer_common, config.rollout, run_inputs.tasks
        batch = min(config.data.train_batch_size, len(tasks.training))
        if config.is_supervised:
            transcripts = [
                run_inputs.codec.transcript(task.init_messages, task.metadata.get("tools"))[0]
                for task in tasks.training[: min(_PROMPTS, batch)]
            ]
            longest = min(max(map(len, transcripts), default=1), rollout.max_model_len)
            return BatchShape(batch, batch, 0, longest, longest, 0, 0)
        episodes = batch * rollout.num_repeat
        steps = rollout.multi_turn.expected_steps
        validation = len(tasks.validation) * validation_repeats(config)
        mini_batches = min(common.mini_batch_num, episodes)
        answer = max(min(rollout.max_response_length_in_one_turn, rollout.max_model_len - 1), 1)
        # The longest of the first prompts, as far as the tasks' own texts determine it.
        lengths = [1]
        for task in run_inputs.tasks.training[:_PROMPTS]:
            question = {"role": "user", "content": task.main_query}
            try:
                lengths.append(len(run_inputs.codec.render([*task.init_messages, question], None)))
            except AstunerError:  # the template needs what only the agent adds
                lengths.append(len(run_inputs.tokenizer.encode(task.main_query)))
        prompt = max(min(max(lengths), rollout.max_model_len - answer), 1)
        return BatchShape(
            groups=divided(batch, mini_batches),
            rows=divided(episodes, mini_batches) * steps,
            prompt=prompt,
            answer=divided(answer, 2),
            longest=prompt + answer,
            episodes=max(episodes, validation),
            concurrent=min(rollout.max_env_worker, rollout.max_num_seqs, max(episodes, validation)),
        )

    @staticmethod
    def longest_of(config: AstunerConfig, max_positions: int) -> BatchShape:
        """Return the shape of a step in which every sample is as long as the configuration allows."""
        common, rollout = config.trainer_common, config.rollout
        longest = min(rollout.max_model_len, max_positions)
        prompt = 1 if config.is_supervised else min(config.data.max_prompt_length, longest - 1)
        batch = config.data.train_batch_size
        episodes = batch * (1 if config.is_supervised else rollout.num_repeat)
        mini_batches = min(common.mini_batch_num, episodes)
        return BatchShape(
            groups=divided(batch, mini_batches),
            rows=divided(episodes, mini_batches) * rollout.multi_turn.expected_steps,
            prompt=prompt,
            answer=longest - prompt,
            longest=longest,
            episodes=episodes,
            concurrent=min(rollout.max_env_worker, rollout.max_num_seqs, episodes),
        )


def divided(number: int, by: int) -> int:
    """Return the quotient, rounded up; exact for numbers of any size."""
    return -(-number // by)


@dataclass(frozen=True)
class ModelShape:
    """The shape of a model in training.

    Attributes:
        model: the model on PyTorch's meta device, without weights; with adapters if the run trains them.
        text: the transformers configuration of its language model.
        parameters: number of distinct weights without adapters; tied weights count once.
        trained: number of trained weights.
        joins_weights: whether the embedded engine joins the weights of its layers.
        counted: bytes of a token that the backward pass needs, if they were counted before; otherwise None.
        memory: bytes of the device, if it is not one of this machine; otherwise None.
    """

    model: Any
    text: Any
    parameters: int
    trained: int
    dtype: torch.dtype
    device: torch.device
    joins_weights: bool
    counted: float | None = None
    memory: int | None = None

    @property
    def width(self) -> int:
        """Bytes of a number in the dtype that the model computes in."""
        return self.dtype.itemsize

    @property
    def kv(self) -> KvShape:
        """Shape of a token's keys and values; the width is 0 for a model without attention."""
        if not hasattr(self.text, "num_attention_heads"):
            return KvShape(1, 1, 0, self.dtype, self.device)
        return fast_forward.kv_shape(self.model, self.dtype, self.device)

    @property
    def copied_bytes(self) -> int:
        """Bytes that packed attention copies for each sample token: its keys and values for all query heads."""
        heads = getattr(self.text, "num_attention_heads", self.kv.heads)
        return self.kv.bytes_per_token // self.kv.heads * int(heads)

    @cached_property
    def layer_parameters(self) -> int:
        """Number of weights without the embeddings."""
        embeddings = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        tied = {id(module.weight): module.weight.numel() for module in embeddings if module is not None}
        in_embeddings: int = sum(tied.values())
        return self.parameters - in_embeddings

    @property
    def packed_head(self) -> int:
        """Number of head weights that the engine copies from the embeddings, if they are tied."""
        embedding, head = (self.model.get_input_embeddings(), self.model.get_output_embeddings())
        is_tied = head is not None and head.weight is embedding.weight
        return int(head.weight.numel()) if is_tied and is_packed(head.weight.numel(), self.dtype) else 0

    @cached_property
    def activation_bytes(self) -> float:
        """Bytes of a token that the backward pass needs, without the logits."""
        if self.counted is not None:
            return self.counted
        for with_mask in (True, False):
            # Some architectures cannot run on the meta device, or accept no mask of this shape, with various errors.
            with contextlib.suppress(Exception):
                # On the meta device, attention also keeps its weights, which grow with the length. A real kernel does
                # not.
                short, long = (
                    self._kept_per_token(tokens, with_mask) for tokens in (_COUNTED_TOKENS, 2 * _COUNTED_TOKENS)
                )
                return 2 * short - long
        return float(_KEPT_PER_LAYER * self.text.num_hidden_layers * self.text.hidden_size * self.width)

    def _kept_per_token(self, tokens: int, with_mask: bool) -> float:
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
        mask = torch.ones((1, 1, tokens, tokens), dtype=torch.bool, device="meta") if with_mask else None
        return kept_bytes(base, ids, mask) / tokens

    @property
    def available(self) -> int:
        """Memory of the device in bytes."""
        if self.memory is not None:
            return self.memory
        if self.device.type == "cuda":
            return int(torch.cuda.get_device_properties(self.device).total_memory)
        return machine_memory()


def kept_bytes(model: Any, ids: torch.Tensor, mask: torch.Tensor | None = None) -> int:
    """Return the bytes that a forward pass of a model's decoder keeps for the backward pass, without weights."""
    body = model.get_decoder()
    body.train()
    kept: dict[int, torch.UntypedStorage] = {}
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        body(input_ids=ids, attention_mask=mask, use_cache=False)
    return sum(storage.nbytes() for storage in kept.values())


def machine_memory() -> int:
    """Return the main memory in bytes that this process may use: the machine's, or the limit of its control group."""
    total = int(psutil.virtual_memory().total)
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        try:
            total = min(total, int(Path("/sys/fs/cgroup", name).read_text()))
        except (OSError, ValueError):  # not there, or "max"
            continue
    return total


def model_shape(config: AstunerConfig, model_path: str, device: torch.device | None = None) -> ModelShape:
    """Read the shape of the model in a folder or at Hugging Face, on `device`; None is `trainer_common.device`.

    ModelError: it has no readable configuration, or lacks the target modules of LoRA.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    device = device or choose_device(config.trainer_common.device)
    dtype = compute_dtype(config.model.dtype, device)
    try:
        shape = AutoConfig.from_pretrained(model_path)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape)
        model.tie_weights()  # loading on the meta device gives tied weights a tensor each
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model.path {model_path!r} cannot be read by transformers: {error}") from error
    model.to(dtype)
    parameters = trained = sum(parameter.numel() for parameter in model.parameters())
    joins_weights = fast_forward.supports(model) and fast_forward.joins_weights(model, device)
    if config.model.lora.rank:
        with torch.device("meta"):
            model = with_lora(model, config.model.lora)
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    return ModelShape(model, shape.get_text_config(), parameters, trained, dtype, device, joins_weights)


def engine_parts(config: AstunerConfig, shape: ModelShape, batch: BatchShape) -> tuple[list[MemoryPart], MemoryPart]:
    """Return the embedded engine's weights, and its key-value cache while it samples."""
    parts = [MemoryPart("engine: weights", shape.parameters * shape.width, SMALLER_MODEL)]
    if shape.joins_weights:
        joined = (shape.parameters + shape.packed_head) * shape.width
        parts.append(MemoryPart("engine: joined weights", joined, SMALLER_MODEL))
    if config.rollout.uses_starting_model:
        parts += [replace(part, name=part.name.replace("engine", "starting model")) for part in parts]
    kv, seqs = shape.kv, config.rollout.max_num_seqs
    # The engine starts after the weights in training, and before the optimizer.
    held = sum(part.size for part in parts) + shape.parameters * 4
    free = None if shape.memory is None else max(shape.memory - held, 0)
    running = min(batch.concurrent * batch.row, default_lane_tokens(kv, seqs, config.rollout.max_model_len, free))
    kept = min(batch.distinct * config.trainer_common.mini_batch_num, default_prefix_cache_tokens(kv, seqs, free))
    return parts, MemoryPart("engine: key-value cache", (running + kept) * kv.bytes_per_token, _CACHE)


def process_parts(config: AstunerConfig, batch: BatchShape, device: torch.device) -> list[MemoryPart]:
    """Return a run's memory without the model: the process with its libraries, and the episodes of a step."""
    if device.type == "cuda":
        return [MemoryPart("CUDA context and kernels", CUDA_CONTEXT, "use another GPU")]
    # This process has imported the libraries and the user's code, and has read the tasks.
    libraries = psutil.Process().memory_info().rss + _RUNTIME
    tokens = batch.row * config.rollout.multi_turn.expected_steps
    fix = "lower rollout.num_repeat, data.train_batch_size or trainer_common.val_pass_n"
    parts = [
        MemoryPart("Python, libraries and tasks", libraries, "use a machine with more memory"),
        MemoryPart("episodes", batch.episodes * (_EPISODE + _EPISODE_TOKEN * tokens), fix),
    ]
    if uses_workers(config) and batch.concurrent:
        size = _FORK_SERVER + batch.concurrent * _EPISODE_PROCESS
        parts.append(MemoryPart("episode workers", size, "lower rollout.max_env_worker"))
    return parts


def process_estimate(config: AstunerConfig, batch: BatchShape, excluded: str) -> MemoryEstimate:
    """Return the estimate of a process whose model is in other processes."""
    parts = tuple(process_parts(config, batch, torch.device("cpu")))
    return MemoryEstimate(0, 0, {"step": parts}, machine_memory(), excluded)
