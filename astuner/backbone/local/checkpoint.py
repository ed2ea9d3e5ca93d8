"""The local backbone's checkpoints: a Hugging Face folder, and what the trainer needs to go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from astuner.backbone.checkpoint_folder import CheckpointFolder, unreadable
from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.backbone.whole_folder import save_synced
from astuner.model_tuner import ChatCodec, first_line

_STATE = "trainer.pt"
_MODEL = "model"


class Checkpoints:
    """`checkpoints/step_000020/` holds `model/` and `trainer.pt`."""

    def __init__(self, folder: Path, keep: int) -> None:
        """Use `folder`; older checkpoints beyond `keep` are removed."""
        self._folder = CheckpointFolder(folder, keep, _STATE)

    def save(self, step: int, policy: Policy, optimiser: Optimiser, codec: ChatCodec, progress: dict[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder.

        Args:
            step: finished training steps.
            policy, optimiser, codec: what is saved.
            progress: anything else that a resumed run needs, of plain types.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """
        state = {
            "trained": policy.training_state(),
            "optimiser": optimiser.state(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
            "progress": {**progress, "step": step},
        }

        def fill(folder: Path) -> None:
            policy.save(folder / _MODEL, codec)
            save_synced(state, folder / _STATE)

        return self._folder.write(step, fill)

    def load(self, policy: Policy, optimiser: Optimiser) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress (with `step`), or None where there is none.

        Raises:
            RecordError: it cannot be read.
        """
        newest = self._folder.newest()
        if newest is None:
            return None
        try:
            return _restore(newest / _STATE, policy, optimiser)
        # A spoilt file makes PyTorch and pickle raise errors of many kinds.
        except Exception as error:
            raise unreadable(newest, first_line(error)) from error


def _restore(file: Path, policy: Policy, optimiser: Optimiser) -> dict[str, Any]:
    state = torch.load(file, map_location=policy.device, weights_only=True)
    policy.load_training_state(state["trained"])
    optimiser.load(state["optimiser"])
    torch.set_rng_state(state["rng"].cpu())
    torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
    progress: dict[str, Any] = state["progress"]
    return progress
