"""The interface of a model's forward pass over a KV cache, and the check that new weights fit the model.

A forward pass prefills tokens, and decodes one more token.

A cache is a tensor of shape [planes, lanes, heads, capacity, width]. A lane belongs to one sequence, and the sequence's
position `p` is at index `p` on the capacity axis. The forward pass defines the meaning of planes, heads and width; the
scheduler only copies along the capacity axis.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from astuner.errors import ModelError


@dataclass(frozen=True, slots=True)
class KvShape:
    """Shape, dtype and device of one token's cache.

    Attributes:
        planes: leading axis, e.g. keys and values of each layer.
        heads: heads per plane.
        width: elements per head.
        dtype, device: of the cache tensors.
    """

    planes: int
    heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one cached token takes."""
        return self.planes * self.heads * self.width * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens to append to one lane.

    Attributes:
        kv: the lane, [planes, heads, capacity, width]; positions before `start` are filled.
        token_ids: the ids at positions `start`, `start + 1`, and so on.
        start: the first position to fill.
    """

    kv: Tensor
    token_ids: Sequence[int]
    start: int


@dataclass(frozen=True, slots=True)
class LaneGroup:
    """Lanes with equal capacity; one token is appended to each.

    Attributes:
        kv: [planes, n, heads, capacity, width]; lane `i` is filled up to position `len(sequences[i]) - 2`.
        sequences: n lists of token ids; each list's last id is not in the cache yet.
        shared: length of a prefix that all sequences share, which must be in each lane's cache.
    """

    kv: Tensor
    sequences: Sequence[Sequence[int]]
    shared: int = 0


class Forward(Protocol):
    """A causal language model with a KV cache. Used by a single thread, in inference mode."""

    @property
    def kv_shape(self) -> KvShape:
        """Shape of one token's cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Exclusive upper bound of token ids."""
        ...

    def extend(self, chunks: Sequence[PrefillChunk]) -> None:
        """Write the chunks' tokens to the cache. Each chunk belongs to a different lane."""
        ...

    def decode(self, groups: Sequence[LaneGroup]) -> Tensor:
        """Write each sequence's last token to the cache and return its logits.

        Returns:
            [lanes of all groups in order, vocab_size] float32. The caller may overwrite it.
        """
        ...

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load new weights: one tensor for each of the model's names, including tied ones."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights that it computes with, by the model's names, for `weight_digests`.

        Within blocks of 64 rows, the values may have another order, and zeros among them.
        """
        ...


class WeightNames:
    """Names, shapes and ties of a model's weights.

    Attributes:
        tensors: the model's state dict, in which tied weights are the same object.
    """

    def __init__(self, model: nn.Module) -> None:
        state = model.state_dict()
        aliases: dict[tuple[int, torch.Size], list[str]] = {}
        for name, tensor in state.items():
            aliases.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
        self._aliases = {name: names for names in aliases.values() for name in names}
        self.tensors: dict[str, Tensor] = {}
        for name in state:
            first = self._aliases[name][0]
            self.tensors[name] = self.tensors[first] if first in self.tensors else state[name].detach()

    def resolve(self, new: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a new tensor for each of the model's names. Tied weights may appear under any one of their names.

        Raises:
            ModelError: a name is unknown or missing, a shape is wrong, or tied weights have different values.
        """
        unknown = sorted(new.keys() - self.tensors.keys())
        if unknown:
            raise ModelError(
                f"new weights have {len(unknown)} names that the model lacks, e.g. {_some(unknown)}; pass weights with "
                f"adapters merged, under the model's names, e.g. {_some(self.tensors)}"
            )
        return {name: self._resolve_name(name, new) for name in self.tensors}

    def _resolve_name(self, name: str, new: Mapping[str, Tensor]) -> Tensor:
        names = [alias for alias in self._aliases[name] if alias in new]
        if not names:
            raise ModelError(f"new weights lack {name!r}; pass all of the model's weights, with adapters merged")
        tensor, expected = new[names[0]], self.tensors[name].shape
        for alias in names:
            if new[alias].shape != expected:
                raise ModelError(
                    f"new weight {alias!r} has shape {tuple(new[alias].shape)}, the model's has {tuple(expected)}"
                )
            # With a stale copy under one of the names, the engine would not sample from the trained model.
            other = new[alias]
            is_same = other.data_ptr() == tensor.data_ptr()
            if not (is_same or torch.allclose(other, tensor.to(other), rtol=0, atol=0, equal_nan=True)):
                raise ModelError(f"{names[0]!r} and {alias!r} are tied in the model, but their new values differ")
        return tensor

    @torch.no_grad()
    def copy_into_model(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the model's weights in place. Weights in the same memory are not copied."""
        for name, tensor in self.tensors.items():
            if weights[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(weights[name])


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3])
