"""Checkpoints that a kill at any moment cannot spoil."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.backbone.whole_folder import save_synced, written_whole
from astuner.errors import RecordError
from astuner.model_tuner import ChatCodec, first_line

_ADVICE = (
    "Mend that, and the same command goes on from the last whole checkpoint; or start anew with another --exp-dir."
)
_STATE = "trainer.pt"
_MODEL = "model"


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: `checkpoints/step_000020/` holds `model/` (a Hugging Face folder) and `trainer.pt`.

    A checkpoint is written beside its place and then renamed, so that what bears its name is whole.

    Attributes:
        folder: where they are.
        keep: older ones beyond this many are removed.
    """

    folder: Path
    keep: int

    def save(self, step: int, policy: Policy, optimiser: Optimiser, codec: ChatCodec, progress: dict[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder.

        Args:
            step: finished training steps.
            policy, optimiser, codec: what is saved.
            progress: anything else that a resumed run needs, of plain types.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        state = {
            "trained": policy.training_state(),
            "optimiser": optimiser.state(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state_all(),
            "progress": {**progress, "step": step},
        }
        with written_whole(final, _ADVICE) as partial:
            policy.save(partial / _MODEL, codec)
            save_synced(state, partial / _STATE)
        for old in self._whole()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load(self, policy: Policy, optimiser: Optimiser) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress (with `step`), or None where there is none.

        Raises:
            RecordError: it cannot be read.
        """
        whole = self._whole()
        if not whole:
            return None
        try:
            return _restore(whole[-1] / _STATE, policy, optimiser)
        # A spoilt file makes PyTorch and pickle raise errors of many kinds.
        except Exception as error:
            raise RecordError(
                f"the checkpoint {whole[-1]} cannot be read ({first_line(error)}); remove that folder to go on from "
                "the one before, or set trainer_common.resume: false to start anew"
            ) from error

    def _whole(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if (path / _STATE).exists())


def _restore(file: Path, policy: Policy, optimiser: Optimiser) -> dict[str, Any]:
    state = torch.load(file, map_location=policy.device, weights_only=True)
    policy.load_training_state(state["trained"])
    optimiser.load(state["optimiser"])
    torch.set_rng_state(state["rng"].cpu())
    torch.cuda.set_rng_state_all([rng.cpu() for rng in state["cuda_rng"]])
    progress: dict[str, Any] = state["progress"]
    return progress
