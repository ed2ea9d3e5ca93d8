"""The model in training: loading, LoRA, precision, and what leaves it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from astuner.backbone.causal_lm import compute_dtype, load_causal_lm
from astuner.backbone.local import packed
from astuner.backbone.local.micro_batches import MicroBatch, micro_batches
from astuner.backbone.local.pack_costs import PackCosts, measure_pack_costs
from astuner.backbone.lora import merged_weights, with_lora
from astuner.backbone.rows import Row
from astuner.config.rollout import ModelConfig
from astuner.config.trainer import PackMode
from astuner.context_tracker import Packing
from astuner.errors import BackboneError
from astuner.model_tuner import ChatCodec


class Policy:
    """A causal language model that is trained, with its starting weights at hand as the reference.

    Trained weights are kept in float32, since a learning rate of 1e-6 would be lost in bfloat16's rounding;
    computation runs in the configured type under autocast.
    """

    def __init__(self, config: ModelConfig, path: str, device: torch.device, pack: PackMode = "auto") -> None:
        """Load the model at `path`.

        Raises:
            ModelError: `path` is no model, or LoRA's target modules are not in it.
            BackboneError: `pack` is tree, and the model does not take packings.
        """
        self.device = device
        self.dtype = compute_dtype(config.dtype, device)
        self.uses_lora = config.lora.rank > 0
        base = load_causal_lm(path, self.dtype if self.uses_lora else torch.float32)
        base.to(device)
        packed.enable(base)
        self._pack = pack
        if pack == "tree" and not packed.takes_packings(base):
            raise BackboneError(
                f"update.pack is tree, but {type(base).__name__} is not among the models whose attention can be packed "
                f"({', '.join(packed.MODEL_TYPES)}, without sliding windows); write auto, which packs where it can"
            )
        if config.gradient_checkpointing:
            base.gradient_checkpointing_enable({"use_reentrant": False})
        # Layers recompute their activations in training mode only.
        self._recomputes = config.gradient_checkpointing
        self.model = with_lora(base, config.lora) if self.uses_lora else base
        self._path = path
        self._reference: Any = None

    @property
    def max_length(self) -> int:
        """The most positions that the model knows."""
        return int(getattr(self.model.config, "max_position_embeddings", None) or 1_000_000)

    @cached_property
    def pack_costs(self) -> PackCosts | None:
        """What packed micro-batches cost, measured on first use; None if the model does not take them."""
        if not packed.takes_packings(self.model):
            return None
        with self.autocast():
            return measure_pack_costs(self.model, self.max_length)

    def micro_batches(self, rows: Sequence[Row], token_budget: int) -> list[MicroBatch]:
        """Cut rows into micro-batches of at most `token_budget` tokens, packed where that is cheaper."""
        return micro_batches(rows, token_budget, self.device, self._pays)

    @property
    def _pays(self) -> Callable[[Packing], bool] | None:
        """Whether a packing is to be computed; None where none is."""
        if self._pack == "tree":
            return lambda packing: True
        return self.pack_costs.pays if self._pack == "auto" and self.pack_costs else None

    @property
    def parameters(self) -> int:
        """Number of weights."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def trainable(self) -> list[torch.nn.Parameter]:
        """Return the parameters that an optimiser should move."""
        return [parameter for parameter in self.model.parameters() if parameter.requires_grad]

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Compute in the configured type."""
        if self.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @contextlib.contextmanager
    def reference(self) -> Iterator[Any]:
        """Give the starting model: the adapters switched off, or a frozen second copy made on first use."""
        if self.uses_lora:
            with self.model.disable_adapter():
                yield self.model
            return
        if self._reference is None:
            self._reference = self.frozen_copy()
            packed.enable(self._reference)
        yield self._reference

    @torch.no_grad()
    def full_weights(self) -> Mapping[str, Tensor]:
        """Return all weights under the base model's own names, adapters merged in, detached."""
        if not self.uses_lora:
            return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}
        return merged_weights(self.model)

    def frozen_copy(self) -> Any:
        """Return the starting model once more, in the type that the policy computes in."""
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

    def learning(self) -> None:
        """Prepare for a backward pass: dropout stays off, since the tokens were sampled without it."""
        self.model.train(self._recomputes)
        for module in self.model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.eval()

    def training_state(self) -> dict[str, Tensor]:
        """Return the trained parameters by name: what a checkpoint must hold beside the starting model."""
        return {name: value.detach() for name, value in self.model.named_parameters() if value.requires_grad}

    @torch.no_grad()
    def load_training_state(self, state: Mapping[str, Tensor]) -> None:
        """Take back what `training_state` gave."""
        named = dict(self.model.named_parameters())
        for name, value in state.items():
            named[name].copy_(value)


@contextlib.contextmanager
def _reporting_its_own_type(model: Any, dtype: torch.dtype) -> Iterator[None]:
    """Let config.json name the type that the model computes in, not the float32 of its master weights."""
    before = model.config.dtype
    model.config.dtype = dtype
    try:
        yield
    finally:
        model.config.dtype = before
