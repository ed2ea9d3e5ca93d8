"""The model in a Tinker server's checkpoint, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from safetensors.torch import load_file
from torch import Tensor

from astuner.backbone.causal_lm import load_causal_lm
from astuner.backbone.lora import TINKER_ALPHA

_SCHEME = "tinker://"
_PEFT = "base_model.model."


def checkpoint_folder(folder: Path, path: str) -> Path:
    """Return where the server with checkpoints in `folder` keeps `tinker://RUN/weights/NAME`."""
    run, kind, name = path.removeprefix(_SCHEME).split("/")
    return folder / quote(run, safe="") / kind / quote(name, safe="")


def forget(folder: Path, paths: Collection[str]) -> None:
    """Remove weights that a server has in `folder`."""
    for path in paths:
        shutil.rmtree(checkpoint_folder(folder, path), ignore_errors=True)


@torch.no_grad()
def save_model(base: str, checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's model, adapters merged in.

    Args:
        base: the model that training began with.
        checkpoint: of `checkpoint_folder`.
        folder: where to.

    Raises:
        ModelError: the base cannot be loaded.
        OSError: the checkpoint cannot be read.
    """
    model = load_causal_lm(base, torch.float32)
    trained = load_file(checkpoint / "trained.safetensors")
    own: dict[str, Tensor] = model.state_dict()
    for name, value in _whole(own, trained).items():
        own[name].copy_(value)
    model.save_pretrained(folder)


def _whole(own: Mapping[str, Tensor], trained: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return what changes of a model's weights: as trained, or with adapters added."""
    downs = {name: value for name, value in trained.items() if ".lora_A." in name}
    if not downs:
        return trained
    changed: dict[str, Any] = {}
    for name, down in downs.items():
        up = trained[name.replace(".lora_A.", ".lora_B.")]
        owner = f"{name.removeprefix(_PEFT).partition('.lora_A.')[0]}.weight"
        changed[owner] = own[owner].float() + TINKER_ALPHA / down.shape[0] * (up @ down)
    return changed
