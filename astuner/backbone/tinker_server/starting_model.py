"""The model that the server was started with: what every training run and every sampler begins from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from astuner.backbone.causal_lm import choose_device, compute_dtype, load_causal_lm
from astuner.backbone.tinker_server.refusal import Refusal
from astuner.model_tuner import load_tokenizer

_POSITIONS = 32_768
"""Taken for a model that names no limit."""


class StartingModel:
    """A causal language model, frozen, with its tokenizer.

    Attributes:
        folder: where it is: a folder or a Hugging Face name.
        names: what clients may call it.
        tokenizer: its tokenizer.
        device, dtype: where and in which type it computes.
        max_length: the most tokens of a sequence.
        vocab_size: token ids are below this.
        stop_token_ids: end a completion, whatever else the client names.
    """

    def __init__(self, folder: str, names: tuple[str, ...], device: str, dtype: str) -> None:
        """Load it.

        Raises:
            ModelError: it is no model.
            BackboneError: there is no such device.
        """
        self.folder, self.names = folder, names
        self.device = choose_device(device)
        self.dtype = compute_dtype(dtype, self.device)
        self.tokenizer = load_tokenizer(folder)
        self._model = load_causal_lm(folder, self.dtype).to(self.device).eval().requires_grad_(False)
        text = self._model.config.get_text_config()
        self.max_length = int(getattr(text, "max_position_embeddings", None) or _POSITIONS)
        self.vocab_size = int(self._model.get_input_embeddings().weight.shape[0])
        self.architecture = str(self._model.config.model_type)
        ends = self._model.generation_config.eos_token_id
        ends = ends if isinstance(ends, list) else [ends]
        self.stop_token_ids = tuple({end for end in (*ends, self.tokenizer.eos_token_id) if end is not None})

    def check_name(self, name: str) -> None:
        """Check that a client means this model.

        Raises:
            Refusal: it names another.
        """
        if name not in (*self.names, self.tokenizer_name):
            raise Refusal(f"base_model is {name!r}; this server has only {' = '.join(self.names)}", 404)

    @property
    def tokenizer_name(self) -> str:
        """The name from which a sampling client loads the tokenizer: it takes a/b/c for variant c of the model a/b."""
        return f"{self.names[0]}/" if self.names[0].count("/") == 2 else self.names[0]

    def view(self) -> Any:
        """Return a module of its own over the same frozen weights; input and output embeddings are not tied."""
        shared = {id(tensor): tensor for tensor in (*self._model.parameters(), *self._model.buffers())}
        model = copy.deepcopy(self._model, shared)
        head = model.get_output_embeddings()
        if head is not None and head.weight is model.get_input_embeddings().weight:
            # An adapter on the output embedding alone would have no place in a tied one.
            head.weight = nn.Parameter(head.weight.detach(), requires_grad=False)
            model.config.get_text_config().tie_word_embeddings = model.config.tie_word_embeddings = False
        return model

    def copy(self) -> Any:
        """Return a copy with weights of its own, which may be overwritten."""
        return copy.deepcopy(self.view())

    def trainable_copy(self) -> Any:
        """Return a copy to train all weights of, in float32: a small step would be lost in bfloat16's rounding."""
        return load_causal_lm(self.folder, torch.float32).to(self.device).eval()

    def weights(self) -> dict[str, Tensor]:
        """Return its weights by name, not to be changed."""
        return {name: tensor.detach() for name, tensor in self._model.state_dict().items()}
