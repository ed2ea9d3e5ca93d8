"""The model in what verl's workers have saved, as a Hugging Face folder."""

from __future__ import annotations

import contextlib
import io
import logging
from pathlib import Path

import torch
from torch import Tensor

from astuner.backbone.causal_lm import load_causal_lm
from astuner.errors import ModelError
from astuner.model_tuner import first_line


@torch.no_grad()
def save_model(base: str, actor: Path, folder: Path) -> None:
    """Put the workers' parts together, and write them.

    Args:
        base: the model that training began with.
        actor: the folder with the parts of FSDP's workers.
        folder: where to.

    Raises:
        ModelError: the base cannot be loaded, or the parts cannot be read or do not fit it.
    """
    from trinity.common.models.utils import load_fsdp_state_dict_from_verl_checkpoint

    model = load_causal_lm(base, torch.float32)
    # It warns of torch.compile, which has no part in this.
    logging.getLogger("torch.distributed.device_mesh").setLevel(logging.ERROR)
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # verl's progress bars
            trained: dict[str, Tensor] = load_fsdp_state_dict_from_verl_checkpoint(str(actor))
        model.load_state_dict(trained)
    # verl's merger raises errors of many kinds.
    except Exception as error:
        raise ModelError(f"{actor} cannot be made into a model: {first_line(error)}; its parts are kept") from error
    model.save_pretrained(folder)
