"""Checkpoints that a kill at any moment cannot spoil."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from astuner.backbone.local.optimiser import Optimiser
from astuner.backbone.local.policy import Policy
from astuner.errors import RecordError

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

    def save(self, step: int, policy: Policy, optimiser: Optimiser, tokenizer: Any, progress: dict[str, Any]) -> Path:
        """Write the checkpoint of `step` and return its folder.

        Args:
            step: finished training steps.
            policy, optimiser, tokenizer: what is saved.
            progress: anything else that a resumed run needs, of plain types.

        Raises:
            RecordError: it cannot be written; earlier checkpoints are untouched.
        """
        final = self.folder / f"step_{step:06d}"
        partial = self.folder / f".partial_{step:06d}"
        state = {
            "trained": policy.training_state(),
            "optimiser": optimiser.state(),
            "rng": torch.get_rng_state(),
            "progress": {**progress, "step": step},
        }
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            policy.save(partial / _MODEL, tokenizer)
            with (partial / _STATE).open("wb") as file:
                torch.save(state, file)
                file.flush()
                os.fsync(file.fileno())
            shutil.rmtree(final, ignore_errors=True)
            partial.rename(final)
        except (OSError, RuntimeError) as error:
            shutil.rmtree(partial, ignore_errors=True)
            raise RecordError(
                f"the checkpoint {final} could not be written: {error}. Free some space or choose another --exp-dir; "
                "the same command then goes on from the last whole checkpoint."
            ) from error
        for old in self._whole()[: -self.keep]:
            shutil.rmtree(old, ignore_errors=True)
        return final

    def load(self, policy: Policy, optimiser: Optimiser) -> dict[str, Any] | None:
        """Restore the newest checkpoint and return its progress (with `step`), or None where there is none."""
        whole = self._whole()
        if not whole:
            return None
        state = torch.load(whole[-1] / _STATE, map_location=policy.device, weights_only=True)
        policy.load_training_state(state["trained"])
        optimiser.load(state["optimiser"])
        torch.set_rng_state(state["rng"].cpu())
        progress: dict[str, Any] = state["progress"]
        return progress

    def _whole(self) -> list[Path]:
        return sorted(path for path in self.folder.glob("step_*") if (path / _STATE).exists())
