"""Checks new weights against the model that they are for, before any of them is used."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from astuner.errors import ModelError


class WeightNames:
    """The names, shapes and ties of a model's weights.

    Attributes:
        tensors: each name of the model's state dict and the tensor behind it; tied weights are one object.
    """

    def __init__(self, model: nn.Module) -> None:
        own = model.state_dict()
        aliases: dict[tuple[int, torch.Size], list[str]] = {}
        for name, tensor in own.items():
            aliases.setdefault((tensor.data_ptr(), tensor.shape), []).append(name)
        self._aliases = {name: names for names in aliases.values() for name in names}
        self.tensors: dict[str, Tensor] = {}
        for name in own:
            first = self._aliases[name][0]
            self.tensors[name] = self.tensors[first] if first in self.tensors else own[name].detach()

    def resolve(self, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return a tensor for each of the model's names; a tied weight may be given under any one of its names.

        Raises:
            ModelError: a name is unknown or missing, a shape is wrong, or tied weights are given different values.
        """
        unknown = sorted(given.keys() - self.tensors.keys())
        if unknown:
            raise ModelError(
                f"new weights have {len(unknown)} names that the model lacks, e.g. {_some(unknown)}; give the merged "
                f"weights under the model's own names, e.g. {_some(self.tensors)}"
            )
        return {name: self._resolve_one(name, given) for name in self.tensors}

    def _resolve_one(self, name: str, given: Mapping[str, Tensor]) -> Tensor:
        names = [alias for alias in self._aliases[name] if alias in given]
        if not names:
            raise ModelError(f"new weights lack {name!r}; give all of the model's weights, adapters merged")
        tensor, own = given[names[0]], self.tensors[name]
        for alias in names:
            if given[alias].shape != own.shape:
                raise ModelError(
                    f"new weight {alias!r} has shape {tuple(given[alias].shape)}, the model's has {tuple(own.shape)}"
                )
            # A stale copy under one of the names would sample from another model than the one that was trained.
            if not _same(given[alias], tensor):
                raise ModelError(
                    f"{names[0]!r} and {alias!r} are one tied weight of the model but were given different values"
                )
        return tensor

    @torch.no_grad()
    def copy_into_model(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite the model's own weights, in place; nothing is copied where they are the same memory."""
        for name, own in self.tensors.items():
            if weights[name].data_ptr() != own.data_ptr():
                own.copy_(weights[name])


def _same(a: Tensor, b: Tensor) -> bool:
    return a.data_ptr() == b.data_ptr() or torch.allclose(a, b.to(a), rtol=0, atol=0, equal_nan=True)


def _some(names: Iterable[str]) -> str:
    return ", ".join(list(names)[:3])
