"""The model in a Tinker server's checkpoint, as a Hugging Face folder."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
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


def forget_all_but(folder: Path, paths: Sequence[str]) -> None:
    """Remove the weights to train on from that a server has in `folder`, but for those of `paths`."""
    kept = {checkpoint_folder(folder, path) for path in paths}
    for found in folder.glob("[!.]*/weights/[!.]*"):
        if found not in kept:
            shutil.rmtree(found, ignore_errors=True)


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
