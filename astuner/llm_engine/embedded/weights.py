"""Checks that new weights fit a model before any of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from astuner.errors import ModelError


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
            if not _same(new[alias], tensor):
                raise ModelError(f"{names[0]!r} and {alias!r} are tied in the model, but their new values differ")
        return tensor

    @torch.no_grad()
    def copy_into_model(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the model's weights in place. Weights in the same memory are not copied."""
        for name, tensor in self.tensors.items():
            if weights[name].data_ptr() != tensor.data_ptr():
                tensor.copy_(weights[name])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.allclose(a, b.to(a), rtol=0, atol=0, equal_nan=True)


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3])
