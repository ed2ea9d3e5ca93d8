"""The base model of the server, from which every training run and the default sampler start."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from astuner.llm_engine.causal_lm import choose_device, compute_dtype, load_causal_lm
from astuner.llm_engine.context_length import context_length
from astuner.model_tuner import load_tokenizer
from astuner.tinker_server.errors import TinkerRequestError

_DEFAULT_MAX_LENGTH = 32_768
"""For models whose configuration has no limit."""


class BaseLanguageModel:
    """A frozen causal language model with its tokenizer.

    Attributes:
        folder: its folder or Hugging Face name.
        names: the names that clients may use; the first one is the one to load the tokenizer from.
        tokenizer: its tokenizer.
        device, dtype: device and dtype of the computation.
        max_length: maximum number of tokens of a sequence.
        vocab_size: number of rows of the input embedding; token ids are smaller.
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
        """Check that `name` is one of the model's names.

        Raises:
            TinkerRequestError: the model has no such name.
        """
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
