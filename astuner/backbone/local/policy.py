"""The model in training: loading, LoRA, precision, saving, and its optimizer.

The learning rate depends on the step only, so that a resumed run needs no scheduler state.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from astuner.algorithms.training_rows import TrainingRow
from astuner.backbone.local.forward import MicroBatch, micro_batches
from astuner.backbone.packing.packed_attention import (
    SUPPORTED_MODELS,
    PackCosts,
    count_pack_costs,
    enable_packed_attention,
    supports_packing,
)
from astuner.backbone.training.lora import iterate_merged, merged_weights, with_lora
from astuner.backbone.training.schedule import learning_rate
from astuner.config.model import ModelConfig
from astuner.config.trainer import OptimConfig, PackMode
from astuner.context_tracker.packing import Packing
from astuner.errors import BackboneError, ModelError
from astuner.llm_engine.causal_lm import compute_dtype, load_causal_lm
from astuner.llm_engine.context_length import context_length
from astuner.llm_engine.cpu_linear import use_onednn
from astuner.llm_engine.weight_digests import weight_digests
from astuner.model_tuner.codec import ChatCodec

_VALUES_PER_PARAMETER = 256
# Smaller processes keep freed memory, because page faults would cost more time than the memory is worth.
_WORTH_RETURNING = 2**30


class Policy:
    """A causal language model in training. Its starting weights serve as the reference model.

    Trained weights are float32, because bfloat16 would round away updates with a learning rate of 1e-6. Computation
    uses the configured dtype under autocast.
    """

    def __init__(self, config: ModelConfig, path: str, device: torch.device, pack: PackMode = "auto") -> None:
        """Load the model at `path`.

        Raises:
            ModelError: `path` has no readable model, or the model lacks the target modules of LoRA.
            BackboneError: `pack` is tree, and the model does not support packed attention.
        """
        self.device = device
        self.dtype = compute_dtype(config.dtype, device)
        self.uses_lora = config.lora.rank > 0
        base = load_causal_lm(path, self.dtype if self.uses_lora else torch.float32)
        base.to(device)
        self._prepare(base)
        self._pack = pack
        if pack == "tree" and not supports_packing(base):
            raise BackboneError(
                f"update.pack is tree, but {type(base).__name__} is not among the models whose attention can be packed "
                f"({SUPPORTED_MODELS}); write auto, which packs where it can"
            )
        if config.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        # Layers recompute their activations in training mode only.
        self._recomputes = config.gradient_checkpointing
        self.model = with_lora(base, config.lora) if self.uses_lora else base
        if not self.trainable():
            raise ModelError(
                "no weight of the model would be trained: the LoRA adapters are not attached, or all parameters are "
                f"frozen. Check model.lora.target_modules ({config.lora.target_modules!r}) and extensions that freeze "
                "parameters or disable adapters"
            )
        self._path = path
        self._reference: Any = None

    def _prepare(self, model: Any) -> None:
        enable_packed_attention(model)
        if self.device.type == "cpu" and self.dtype == torch.float32:
            use_onednn(model)

    @property
    def max_length(self) -> int:
        """Maximum sequence length of the model in tokens."""
        return context_length(self.model.config) or 1_000_000

    @cached_property
    def pack_costs(self) -> PackCosts | None:
        """Costs of packed micro-batches; None if the model does not support them."""
        return count_pack_costs(self.model, self.device) if supports_packing(self.model) else None

    def micro_batches(self, rows: Sequence[TrainingRow], token_budget: int) -> list[MicroBatch]:
        """Cut rows into micro-batches of at most `token_budget` tokens, packed where that is cheaper."""
        return micro_batches(rows, token_budget, self.device, self._should_pack)

    @property
    def _should_pack(self) -> Callable[[Packing], bool] | None:
        """The function that decides whether to compute a packing; None to pack nothing."""
        if self._pack == "tree":
            return lambda packing: True
        return self.pack_costs.is_cheaper_packed if self._pack == "auto" and self.pack_costs else None

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def trainable(self) -> list[torch.nn.Parameter]:
        """Return the trained parameters."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context that computes in the configured dtype."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """Yield the starting model: the model with adapters disabled, or a frozen copy that is created lazily."""
        if self.uses_lora:
            with self.model.disable_adapter():
                yield self.model
            return
        if self._reference is None:
            self._reference = self.frozen_copy()
            self._prepare(self._reference)
        yield self._reference

    @torch.no_grad()
    def full_weights(self) -> Mapping[str, Tensor]:
        """Return all weights under the base model's own names, adapters merged in, detached."""
        if not self.uses_lora:
            return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        return merged_weights(self.model)

    def weight_digests(self) -> dict[str, int]:
        """Return the checksums of `full_weights`, in the dtype that the policy computes in.

        They do not depend on a tensor that was handed to an engine: adapters are merged again.
        """
        if self.uses_lora:
            return weight_digests(iterate_merged(self.model), self.dtype)
        state = self.model.state_dict()
        first_names: dict[int, str] = {}  # tied weights are read once
        names = {name: first_names.setdefault(tensor.data_ptr(), name) for name, tensor in state.items()}
        digests = weight_digests(((name, state[name]) for name in first_names.values()), self.dtype)
        return {name: digests[first] for name, first in names.items()}

    def frozen_copy(self) -> Any:
        """Return a frozen copy of the starting model, in the dtype that the policy computes in."""
        return load_causal_lm(self._path, self.dtype).to(self.device).eval().requires_grad_(False)

    def save(self, folder: Path, codec: ChatCodec) -> None:
        """Write a Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads, adapters merged in."""
        model = self.model.get_base_model() if self.uses_lora else self.model
        written: dict[int, Tensor] = {}  # tied weights stay one tensor
        weights = {
            name: written.setdefault(tensor.data_ptr(), tensor.to("cpu", self.dtype).contiguous())
            for name, tensor in self.full_weights().items()
        }
        with _reporting_its_own_type(model, self.dtype):
            model.save_pretrained(folder, state_dict=weights)
        codec.save(folder)

    def prepare_update(self) -> None:
        """Prepare for a backward pass. Dropout stays off, because the tokens were sampled without it."""
        self.model.train(self._recomputes)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()

    def training_state(self) -> dict[str, Tensor]:
        """Return the trained parameters by name. A checkpoint restores them on top of the starting model."""
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        """Restore the parameters that `training_state` returned."""
        named = dict(self.model.named_parameters())
        for name, value in state.items():
            named[name].copy_(value)


@contextlib.contextmanager
def _reporting_its_own_type(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Make config.json name the dtype that the model computes in, not the float32 of its master weights."""
    before = model.config.dtype
    model.config.dtype = dtype
    try:
        yield
    finally:
        model.config.dtype = before


class GradientNotFinite(BackboneError):
    """The gradient of a mini-batch is not finite."""

    def __init__(self, step: int, norm: float) -> None:
        super().__init__(
            f"step {step}: the gradient's norm is {norm}; lower trainer_common.optim.lr, or set model.dtype: float32"
        )
        self.norm = norm


class Optimizer:
    """AdamW, gradient clipping, and the schedule of `trainer_common.optim` over `total_steps` training steps."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], config: OptimConfig, total_steps: int) -> None:
        self._parameters = list(parameters)
        self._config = config
        self.total_steps = total_steps
        self._adamw = torch.optim.AdamW(
            self._parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True
        )

    def lr(self, step: int) -> float:
        """Return the learning rate of training step `step` (1-based)."""
        return learning_rate(self._config, self.total_steps, step)

    def step(self, step: int) -> float:
        """Apply the gradient and clear it; return its norm before clipping. GradientNotFinite leaves the weights."""
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters, self._config.grad_clip))
        if not math.isfinite(norm):
            self._adamw.zero_grad(set_to_none=True)
            raise GradientNotFinite(step, norm)
        for group in self._adamw.param_groups:
            group["lr"] = self.lr(step)
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        return norm

    def sampled_weights(self) -> torch.Tensor:
        """Return a copy of some hundred values per parameter, as one vector, to see whether weights changed."""
        values = [parameter.detach().flatten() for parameter in self._parameters]
        return torch.cat([value[:: max(1, len(value) // _VALUES_PER_PARAMETER)].float() for value in values])

    def state(self) -> dict[str, Any]:
        """Return the state of AdamW, for `load`."""
        return self._adamw.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self._adamw.load_state_dict(state)


def return_free_memory() -> None:
    """Return freed memory to the operating system.

    glibc keeps freed blocks of up to 32 MiB. Rollout, micro-batches, optimizer and sync allocate blocks with different
    sizes, so the process would hold their peaks' sum instead of the highest peak.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim is not None and psutil.Process().memory_info().rss > _WORTH_RETURNING:
        trim(0)
