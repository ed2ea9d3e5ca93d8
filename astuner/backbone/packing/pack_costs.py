"""Costs of packed and separate rows in counted operations, which decide whether a micro-batch is packed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from astuner.context_tracker import Packing

# On a CPU, each batch of pieces is a separate attention in each layer. Its copies and calls take about 0.2 ms, in which
# a core computes this many floating-point operations. On a GPU, one kernel computes all pieces.
_KERNEL_OPERATIONS = 4e6


@dataclass(frozen=True)
class PackCosts:
    """Floating-point operations of a forward pass. A backward pass takes a fixed multiple of them.

    Attributes:
        per_token: operations per token.
        per_pair: operations per pair of tokens that an attention kernel computes. A causal kernel computes half of all
            pairs, a kernel with a mask all of them.
        per_batch: operations that take as long as the overhead for one batch of a packing's pieces.
    """

    per_token: float
    per_pair: float
    per_batch: float

    def of_packing(self, packing: Packing) -> float:
        """Return the operations of a forward pass over a packing."""
        pairs = 0.0
        for batch in packing.batches:
            piece = packing.pieces[batch[0]]
            keys = piece.depth + piece.size if piece.path else piece.size / 2
            pairs += len(batch) * piece.size * keys
        return self.per_token * len(packing.token_ids) + self.per_pair * pairs + self.per_batch * len(packing.batches)

    def of_separate_rows(self, packing: Packing) -> float:
        """Return the operations for computing a packing's sequences as separate rows, without padding."""
        lengths = [len(places) for places in packing.places]
        return sum(self.per_token * length + self.per_pair * length * length / 2 for length in lengths)

    def is_cheaper_packed(self, packing: Packing) -> bool:
        """Return whether a packing takes fewer operations than separate rows."""
        return self.of_packing(packing) < self.of_separate_rows(packing)


def count_pack_costs(model: Any, device: torch.device) -> PackCosts:
    """Count the operations in a forward pass, for a model that supports packing.

    The counts depend on the model and the device only, so a run and its repetition compute the same rows together and
    round alike.

    Args:
        model: prepared by `enable_packed_attention`.
        device: the device that computes.
    """
    config = model.config
    heads, layers = config.num_attention_heads, config.num_hidden_layers
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    # A weight of a linear layer is multiplied and added once per token. Logits are needed for the same tokens with and
    # without packing.
    embeddings = {id(module) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    linear = sum(
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, torch.nn.Linear) and id(module) not in embeddings
    )
    # The products of queries with keys, and of probabilities with values.
    return PackCosts(2.0 * linear, 4.0 * layers * width, _KERNEL_OPERATIONS * layers if device.type == "cpu" else 0.0)
