"""A model in training: passes over data, optimiser steps, and its state."""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from astuner.backbone.lora import TINKER_ALPHA, merged_weights, with_lora
from astuner.backbone.tinker_server.data import Batch, Pass, batches
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.starting_model import StartingModel
from astuner.backbone.tinker_server.wire import AdamParams, LoraSettings
from astuner.config.rollout import LoraConfig

_DRAWING = threading.Lock()


class Trainee:
    """The starting model with adapters, or a copy of it of which all weights are trained.

    Gradients add up over passes until an optimiser step takes them. Not thread-safe: one thread calls it.
    """

    def __init__(self, start: StartingModel, lora: LoraSettings) -> None:
        """Make it; its outputs are the starting model's.

        Raises:
            Refusal: the adapters have no place in this model.
        """
        self._start = start
        self._uses_lora = lora.rank > 0
        self.model = _adapted(start, lora) if self._uses_lora else start.trainable_copy()
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._adam = self._new_adam()
        self._has_gradient = False

    def run(self, asked: Pass, *, backward: bool, check: Callable[[], None]) -> dict[str, Any]:
        """Compute a pass; with `backward`, add its gradient to what is accumulated.

        Args:
            asked: the data and the loss.
            backward: whether gradients are computed.
            check: called between batches; what it raises ends the pass.

        Returns:
            The wire's ForwardBackwardOutput.

        Raises:
            Refusal: a loss is not finite. All that was accumulated is dropped then.
        """
        outputs: list[dict[str, Any]] = [{} for _ in asked.rows]
        total = 0.0
        try:
            for batch in batches(asked, self._start.vocab_size, self._start.device):
                check()
                with torch.set_grad_enabled(backward):
                    logprobs = self._logprobs(batch)
                    losses = asked.loss.compute(logprobs, batch.inputs, asked.options)
                    loss = losses.sum()
                if not math.isfinite(loss.item()):
                    raise Refusal("the loss is not finite; the accumulated gradient was dropped, the weights stay")
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._has_gradient = True
                total += loss.item()
                _fill(outputs, batch, logprobs, losses)
        except BaseException:
            if backward:
                self._drop_gradient()
            raise
        return {"loss_fn_output_type": "TorchLossReturn", "loss_fn_outputs": outputs, "metrics": {"loss:sum": total}}

    def _logprobs(self, batch: Batch) -> Tensor:
        """Return the log-probabilities of a batch's targets, [M] float32."""
        with self._autocast():
            # Rows are padded on the right, so a causal model needs no mask: no token sees padding.
            logits = self.model(input_ids=batch.ids, use_cache=False).logits
        kept = torch.cat([row[:size] for row, size in zip(logits, batch.sizes, strict=True)])
        return -functional.cross_entropy(kept.float(), batch.targets, reduction="none")

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        if self._start.dtype == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._start.device.type, self._start.dtype)

    def optim_step(self, params: AdamParams) -> dict[str, Any]:
        """Move the weights by AdamW and clear the gradient.

        Returns:
            The wire's OptimStepResponse.

        Raises:
            Refusal: there is no gradient, or it is not finite. The weights stay.
        """
        if not self._has_gradient:
            raise Refusal("optim_step without a gradient; call forward_backward since the last step, or load")
        norm = float(nn.utils.clip_grad_norm_(self._parameters, params.grad_clip_norm or math.inf))
        if not math.isfinite(norm):
            self._drop_gradient()
            raise Refusal(f"the gradient's norm is {norm}; it was dropped, the weights stay; lower the learning rate")
        for group in self._adam.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self._adam.step()
        self._drop_gradient()
        return {"metrics": {"optim/grad_norm": norm, "optim/lr": params.learning_rate}}

    def weights(self) -> dict[str, Tensor]:
        """Return what is trained, by name, each tensor with memory of its own: the adapters, or all weights."""
        if self._uses_lora:
            named = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        else:
            named = self.model.state_dict()
        return {name: value.detach().cpu().clone().contiguous() for name, value in named.items()}

    def optimiser(self) -> dict[str, Any]:
        """Return the optimiser's state."""
        return self._adam.state_dict()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], optimiser: dict[str, Any] | None) -> None:
        """Take back `weights` and `optimiser`; without the latter, begin with a new one.

        Raises:
            Refusal: the weights are of another kind of model.
        """
        load_trained(self.model, weights)
        self._adam = self._new_adam()
        if optimiser is not None:
            self._adam.load_state_dict(optimiser)
        self._drop_gradient()

    def _new_adam(self) -> torch.optim.AdamW:
        return torch.optim.AdamW(self._parameters)

    def _drop_gradient(self) -> None:
        self._adam.zero_grad(set_to_none=True)
        self._has_gradient = False


@torch.no_grad()
def load_trained(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Write what `Trainee.weights` gave into a model of the same kind.

    Raises:
        Refusal: it is of another kind.
    """
    own = {**model.state_dict(), **dict(model.named_parameters())}
    misfits = [name for name, value in weights.items() if name not in own or own[name].shape != value.shape]
    if misfits:
        raise Refusal(f"the checkpoint does not fit this model: {len(misfits)} weights differ, e.g. {misfits[0]}")
    for name, value in weights.items():
        own[name].copy_(value)


def adapted_weights(start: StartingModel, lora: LoraSettings, trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return all weights of the starting model with trained adapters merged in.

    Raises:
        Refusal: the adapters do not fit.
    """
    model = _adapted(start, lora)
    load_trained(model, trained)
    return merged_weights(model)


def _adapted(start: StartingModel, lora: LoraSettings) -> Any:
    base = start.view()
    targets = _targets(base, lora)
    if not targets:
        raise Refusal("lora_config leaves nothing to train in this model; set train_attn, train_mlp or train_unembed")
    settings = LoraConfig(rank=lora.rank, alpha=TINKER_ALPHA, target_modules=targets)
    devices = [start.device] if start.device.type == "cuda" else []
    # PyTorch's generator is the process's: what another thread draws meanwhile would change what a seed gives.
    with _DRAWING, torch.random.fork_rng(devices, enabled=lora.seed is not None):
        if lora.seed is not None:
            torch.manual_seed(lora.seed)
        model = with_lora(base, settings)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.eval()


def _targets(base: Any, lora: LoraSettings) -> list[str]:
    """Return the names of the linear layers that get adapters."""
    head = base.get_output_embeddings()
    names = []
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        if module is head:
            wanted = lora.train_unembed
        else:
            wanted = lora.train_attn if "attn" in name or "attention" in name else lora.train_mlp
        if wanted:
            names.append(name)
    return names


def _fill(outputs: list[dict[str, Any]], batch: Batch, logprobs: Tensor, losses: Tensor) -> None:
    """Write a batch's numbers to the outputs of its rows."""
    named = {"logprobs": logprobs, "elementwise_loss": losses}
    for name, values in named.items():
        for index, row in zip(batch.indices, torch.split(values.detach().cpu(), list(batch.sizes)), strict=True):
            outputs[index][name] = {"data": row.tolist(), "dtype": "float32", "shape": [len(row)]}
