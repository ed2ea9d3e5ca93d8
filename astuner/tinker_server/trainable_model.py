"""The frozen base model, and a model in training: its passes, optimizer steps and state."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from astuner.backbone.training.lora import iterate_merged, merged_weights, with_lora
from astuner.backbone.training.tinker_policy import ALL_LINEAR, TinkerPolicy
from astuner.config.model import LoraConfig
from astuner.errors import ModelError
from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
from astuner.llm_engine.context_length import context_length
from astuner.llm_engine.weight_digests import weight_digests
from astuner.model_tuner.codec import load_tokenizer
from astuner.tinker_server.forward_pass import DatumBatch, ForwardPass, batches
from astuner.tinker_server.wire import AdamParams, LoraSettings, TinkerRequestError

_DEFAULT_MAX_LENGTH = 32_768
"""For models whose configuration has no limit."""
_SEED_LOCK = threading.Lock()


class BaseLanguageModel:
    """A frozen causal language model with its tokenizer.

    Attributes:
        folder: its folder or Hugging Face name.
        names: the names that clients may use; the first one is the one to load the tokenizer from.
        max_length: maximum number of tokens in a sequence.
        vocab_size: number of rows in the input embedding; token ids are smaller.
        architecture: `model_type` of its configuration.
        stop_token_ids: token ids that always end a completion.
    """

    def __init__(self, folder: str, names: tuple[str, ...], device: str, dtype: str) -> None:
        """Load the model.

        Raises:
            ModelError: the model cannot be loaded.
            BackboneError: the device does not exist.
        """
        self.folder, self.names = folder, names
        self.device = choose_device(device)
        self.dtype = compute_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(folder)
        self._model = load_causal_lm(folder, self.dtype).to(self.device).eval().requires_grad_(False)
        self.max_length = context_length(self._model.config) or _DEFAULT_MAX_LENGTH
        self.vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        self.architecture = str(self._model.config.model_type)
        eos = self._model.generation_config.eos_token_id
        eos = eos if isinstance(eos, list) else [eos]
        self.stop_token_ids = tuple({token for token in (*eos, self.tokenizer.eos_token_id) if token is not None})

    def check_name(self, name: str) -> None:
        """Raise `TinkerRequestError` if `name` is none of the model's names."""
        if name not in (*self.names, self.tokenizer_name):
            raise TinkerRequestError(f"base_model is {name!r}, but this server has only {' = '.join(self.names)}", 404)

    @property
    def tokenizer_name(self) -> str:
        """The name from which sampling clients load the tokenizer; they read `a/b/c` as variant c of model `a/b`."""
        return f"{self.names[0]}/" if self.names[0].count("/") == 2 else self.names[0]

    def view(self) -> Any:
        """Return a new module that shares the frozen weights, with untied input and output embeddings."""
        shared = {id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())}
        model = copy.deepcopy(self._model, shared)
        head = model.get_output_embeddings()
        if head is not None and head.weight is model.get_input_embeddings().weight:
            # An adapter on the output embedding must not change a tied input embedding.
            head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
            model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        return model

    def copy(self) -> Any:
        """Return a copy with its own weights, which may be overwritten."""
        return copy.deepcopy(self.view())

    def trainable_copy(self) -> Any:
        """Return a float32 copy for full training; in bfloat16, small steps would be lost to rounding."""
        return load_causal_lm(self.folder, torch.float32).to(self.device).eval()

    def weights(self) -> dict[str, Tensor]:
        """Return the weights by name; they must not be changed."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}


class TrainableModel:
    """The base model with trainable adapters, or a fully trainable copy of it.

    Gradients accumulate over passes until an optimizer step. Not thread-safe.
    """

    def __init__(self, base_model: BaseLanguageModel, lora: LoraSettings, policy: TinkerPolicy) -> None:
        """Create the model; its outputs equal the base model's.

        Raises:
            TinkerRequestError: the adapters match no layer of the model.
        """
        self._base_model, self.policy = base_model, policy
        self._uses_lora = lora.rank > 0
        self.model = _with_adapters(base_model, lora, policy) if self._uses_lora else base_model.trainable_copy()
        self._parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self._optimizer = torch.optim.AdamW(self._parameters)
        self._has_gradient = False

    def run(self, forward_pass: ForwardPass, *, backward: bool, check_open: Callable[[], None]) -> dict[str, Any]:
        """Run a forward pass and, with `backward`, accumulate its gradient. Return Tinker's ForwardBackwardOutput.

        `check_open` is called before each batch, and may raise to stop the pass.

        Raises:
            TinkerRequestError: the loss is not finite. The accumulated gradient is dropped.
        """
        outputs: list[dict[str, Any]] = [{} for _ in forward_pass.rows]
        total = 0.0
        try:
            for batch in batches(forward_pass, self._base_model.vocab_size, self._base_model.device):
                check_open()
                with torch.set_grad_enabled(backward):
                    logprobs = self._logprobs(batch)
                    losses = forward_pass.losses(logprobs, batch)
                    loss = losses.sum()
                if not math.isfinite(loss.item()):
                    raise TinkerRequestError(
                        "the loss is not finite; the accumulated gradient was dropped, the weights are unchanged; "
                        "check the advantages and logprobs of the data, or lower the learning rate"
                    )
                if backward:
                    loss.backward()  # type: ignore[no-untyped-call]
                    self._has_gradient = True
                total += loss.item()
                for name, values in {"logprobs": logprobs, "elementwise_loss": losses}.items():
                    rows = torch.split(values.detach().cpu(), list(batch.sizes))
                    for index, row in zip(batch.indices, rows, strict=True):
                        outputs[index][name] = {"data": row.tolist(), "dtype": "float32", "shape": [len(row)]}
        except BaseException:
            if backward:
                self._drop_gradient()
            raise
        return {"loss_fn_output_type": "TorchLossReturn", "loss_fn_outputs": outputs, "metrics": {"loss:sum": total}}

    def _logprobs(self, batch: DatumBatch) -> Tensor:
        """Return the log-probabilities of a batch's targets at the policy's temperature, [M] float32."""
        dtype, device = self._base_model.dtype, self._base_model.device.type
        with contextlib.nullcontext() if dtype == torch.float32 else torch.autocast(device, dtype):
            # Rows are padded on the right, so that a causal model needs no mask: no token attends to padding.
            logits = self.model(input_ids=batch.ids, use_cache=False).logits
        unpadded = torch.cat([row[:size] for row, size in zip(logits, batch.sizes, strict=True)])
        return -functional.cross_entropy(unpadded.float() / self.policy.temperature, batch.targets, reduction="none")

    def optim_step(self, params: AdamParams) -> dict[str, Any]:
        """Take an AdamW step, clear the gradient, and return Tinker's OptimStepResponse.

        Raises:
            TinkerRequestError: there is no gradient, or it is not finite. The weights are unchanged.
        """
        if not self._has_gradient:
            raise TinkerRequestError("optim_step without a gradient; call forward_backward first")
        norm = float(nn.utils.clip_grad_norm_(self._parameters, params.grad_clip_norm or math.inf))
        if not math.isfinite(norm):
            self._drop_gradient()
            raise TinkerRequestError(
                f"the gradient norm is {norm}; the gradient was dropped, the weights are unchanged; lower the learning "
                "rate"
            )
        for group in self._optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        self._optimizer.step()
        self._drop_gradient()
        return {"metrics": {"optim/grad_norm": norm, "optim/lr": params.learning_rate}}

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the trained weights by name: the adapters, or all weights."""
        if self._uses_lora:
            named = {name: value for name, value in self.model.named_parameters() if value.requires_grad}
        else:
            named = self.model.state_dict()
        return {name: value.detach().cpu().clone().contiguous() for name, value in named.items()}

    def weight_digests(self) -> dict[str, int]:
        """Return checksums for all weights, with adapters merged, in the samplers' dtype."""
        weights = iterate_merged(self.model) if self._uses_lora else self.model.state_dict().items()
        return weight_digests(weights, self._base_model.dtype)

    def optimizer_state(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self._optimizer.state_dict()

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], optimizer_state: dict[str, Any] | None) -> None:
        """Load weights and the optimizer's state. If there is no optimizer state, reset the optimizer.

        Raises:
            TinkerRequestError: the weights do not fit the model.
        """
        load_weights(self.model, weights)
        self._optimizer = torch.optim.AdamW(self._parameters)
        if optimizer_state is not None:
            self._optimizer.load_state_dict(optimizer_state)
        self._drop_gradient()

    def _drop_gradient(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self._has_gradient = False


@torch.no_grad()
def load_weights(model: Any, weights: Mapping[str, Tensor]) -> None:
    """Load the result of `TrainableModel.weights` into a model with the same architecture.

    Raises:
        TinkerRequestError: a name or shape differs.
    """
    current = {**model.state_dict(), **dict(model.named_parameters())}
    mismatches = [name for name, value in weights.items() if name not in current or current[name].shape != value.shape]
    if mismatches:
        raise TinkerRequestError(
            f"the checkpoint does not fit this model: {len(mismatches)} weights differ, e.g. {mismatches[0]}"
        )
    for name, value in weights.items():
        current[name].copy_(value)


def weights_with_adapters(
    base_model: BaseLanguageModel, lora: LoraSettings, policy: TinkerPolicy, trained: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return all weights of the base model with trained adapters merged.

    Raises:
        TinkerRequestError: the adapters do not fit the model.
    """
    model = _with_adapters(base_model, lora, policy)
    load_weights(model, trained)
    return merged_weights(model)


def _with_adapters(base_model: BaseLanguageModel, lora: LoraSettings, policy: TinkerPolicy) -> Any:
    base = base_model.view()
    head = base.get_output_embeddings()

    def is_target(name: str, module: nn.Module) -> bool:
        if not isinstance(module, nn.Linear):
            return False
        if module is head:
            return lora.train_unembed
        return lora.train_attn if "attn" in name or "attention" in name else lora.train_mlp

    targets = policy.lora_target_modules
    if targets == ALL_LINEAR:
        targets = [name for name, module in base.named_modules() if is_target(name, module)]
    if not targets:
        raise TinkerRequestError(
            "lora_config selects no layer of this model; set train_attn, train_mlp or train_unembed"
        )
    settings = LoraConfig(rank=lora.rank, alpha=policy.lora_alpha, target_modules=targets)
    devices = [base_model.device] if base_model.device.type == "cuda" else []
    # PyTorch's generator is global: numbers drawn by another thread would change the result of a seed.
    with _SEED_LOCK, torch.random.fork_rng(devices, enabled=lora.seed is not None):
        if lora.seed is not None:
            torch.manual_seed(lora.seed)
        try:
            model = with_lora(base, settings)
        except ModelError as error:
            raise TinkerRequestError(str(error)) from error
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return model.eval()
