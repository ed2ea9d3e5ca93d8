"""Weights on disk, by the paths that clients know them by: `tinker://RUN/weights/NAME`.

`FOLDER/RUN/run.json` says what a training run is of; `FOLDER/RUN/weights/NAME` and `…/sampler_weights/NAME` hold
`trained.safetensors`, `checkpoint.json` and, of the former kind, `optimiser.pt`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from astuner.backbone.tinker_server.refusal import Refusal
from astuner.backbone.tinker_server.wire import LoraSettings
from astuner.backbone.whole_folder import save_synced, written_whole
from astuner.errors import RecordError
from astuner.model_tuner import first_line

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
_SCHEME = "tinker://"
_ADVICE = "Make room there, or start the server with another --checkpoint-dir."


@dataclass(frozen=True)
class Run:
    """A training run.

    Attributes:
        run_id: also the model's id.
        base_model: as the client called it.
        lora: its adapters.
        metadata: the client's own.
        created: when it began.
    """

    run_id: str
    base_model: str
    lora: LoraSettings
    metadata: Mapping[str, Any]
    created: datetime


@dataclass(frozen=True)
class Checkpoint:
    """Weights of a run on disk.

    Attributes:
        run_id, kind, name: its path.
        folder: where it is.
        time: when it was written.
        expires: when it is to go, or None.
        ephemeral: whether it goes with its session.
    """

    run_id: str
    kind: Kind
    name: str
    folder: Path
    time: datetime
    expires: datetime | None = field(compare=False)
    ephemeral: bool

    @property
    def path(self) -> str:
        """What clients call it."""
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"

    def weights(self) -> dict[str, Tensor]:
        """Read what was trained.

        Raises:
            Refusal: it is gone.
            RecordError: it cannot be read.
        """
        weights: dict[str, Tensor] = self._read("trained.safetensors", load_file)
        return weights

    def optimiser(self) -> dict[str, Any]:
        """Read the optimiser's state.

        Raises:
            Refusal: it is gone.
            RecordError: it cannot be read.
        """
        read = partial(torch.load, map_location="cpu", weights_only=True)
        state: dict[str, Any] = self._read("optimiser.pt", read)
        return state

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        if not self.folder.is_dir():
            raise Refusal(
                f"{self.path} is gone: it was deleted, has expired, or made room for newer weights (--max-samplers); "
                "save the weights again",
                404,
            )
        try:
            return read(self.folder / name)
        # A spoilt file makes PyTorch, pickle and safetensors raise errors of many kinds.
        except Exception as error:
            raise RecordError(f"{self.path} cannot be read ({first_line(error)}); load another checkpoint") from error


class CheckpointStore:
    """The runs and checkpoints under one folder. What it writes is whole or not there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, run_id: str) -> Run:
        """Return a run.

        Raises:
            Refusal: there is none of that id.
        """
        file = self.folder / quote(run_id, safe="") / "run.json"
        if run_id.startswith(".") or not file.is_file():
            raise Refusal(f"there is no training run {run_id!r} in {self.folder}", 404)
        known = json.loads(file.read_text())
        return Run(
            run_id,
            known["base_model"],
            LoraSettings(**known["lora"]),
            known["metadata"],
            datetime.fromisoformat(known["created"]),
        )

    def runs(self) -> list[Run]:
        """Return all runs, the latest first."""
        found = [self.run(file.parent.name) for file in self.folder.glob("[!.]*/run.json")]
        return sorted(found, key=lambda run: run.created, reverse=True)

    def save(
        self,
        run: Run,
        kind: Kind,
        name: str,
        weights: Mapping[str, Tensor],
        optimiser: dict[str, Any] | None,
        *,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
    ) -> Checkpoint:
        """Write a checkpoint.

        Raises:
            Refusal: there is one of that name, and it is not to be overwritten.
            RecordError: it cannot be written.
        """
        folder = self.folder / run.run_id / kind / quote(name, safe="")
        if folder.exists() and not overwrite:
            raise Refusal(
                f"{_SCHEME}{run.run_id}/{kind}/{name} is there already; choose another name, or overwrite=True"
            )
        now = datetime.now(UTC)
        expires = now + timedelta(seconds=ttl_seconds) if ttl_seconds else None
        checkpoint = Checkpoint(run.run_id, kind, name, folder, now, expires, ephemeral)
        with written_whole(folder, "the checkpoint", _ADVICE) as partial:
            save_file(dict(weights), partial / "trained.safetensors")
            if optimiser is not None:
                save_synced(optimiser, partial / "optimiser.pt")
            _write_about(checkpoint, partial)
        about = self.folder / run.run_id / "run.json"
        if not about.exists():
            known = {"base_model": run.base_model, "lora": run.lora.model_dump(), "metadata": dict(run.metadata)}
            _write_json({**known, "created": run.created.isoformat()}, about)
        return checkpoint

    def find(self, path: str) -> Checkpoint:
        """Return the checkpoint of a path.

        Raises:
            Refusal: there is none.
        """
        parts = path.removeprefix(_SCHEME).split("/")
        if path.startswith(_SCHEME) and len(parts) == 3 and parts[1] in KINDS and not parts[0].startswith("."):
            run_id, kind, name = parts
            folder = self.folder / quote(run_id, safe="") / kind / quote(name, safe="")
            if not name.startswith(".") and (folder / "checkpoint.json").is_file():
                return _read_about(folder)
        raise Refusal(
            f"there is no checkpoint {path!r} in {self.folder}; a path is tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME, as saving returned it",
            404,
        )

    def find_in(self, run_id: str, checkpoint_id: str) -> Checkpoint:
        """Return a run's checkpoint by `KIND/NAME`, or by a name that only one of the two kinds has.

        Raises:
            Refusal: there is none.
        """
        if "/" in checkpoint_id:
            return self.find(f"{_SCHEME}{run_id}/{checkpoint_id}")
        found = [one for one in self.checkpoints(run_id) if one.name == checkpoint_id]
        if len(found) != 1:
            why = "there is none" if not found else "both kinds have one"
            raise Refusal(f"checkpoint {checkpoint_id!r} of {run_id}: {why} of that name; give KIND/NAME", 404)
        return found[0]

    def checkpoints(self, run_id: str | None = None) -> list[Checkpoint]:
        """Return the checkpoints of a run, or of all runs, the oldest first."""
        runs = [run_id] if run_id is not None else [run.run_id for run in self.runs()]
        return sorted((one for run in runs for one in self._of(run)), key=lambda one: one.time)

    def _of(self, run_id: str) -> Iterator[Checkpoint]:
        for kind in KINDS:
            for file in (self.folder / quote(run_id, safe="") / kind).glob("[!.]*/checkpoint.json"):
                yield _read_about(file.parent)

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint."""
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def set_ttl(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Let a checkpoint expire in that time, or never."""
        expires = datetime.now(UTC) + timedelta(seconds=seconds) if seconds else None
        _write_about(replace(checkpoint, expires=expires), checkpoint.folder)

    def delete_expired(self) -> list[str]:
        """Remove what has expired; return the paths."""
        now = datetime.now(UTC)
        expired = [one for one in self.checkpoints() if one.expires is not None and one.expires <= now]
        for checkpoint in expired:
            self.delete(checkpoint)
        return [checkpoint.path for checkpoint in expired]


def _write_about(checkpoint: Checkpoint, folder: Path) -> None:
    about = {
        "time": checkpoint.time.isoformat(),
        "expires": checkpoint.expires.isoformat() if checkpoint.expires else None,
        "ephemeral": checkpoint.ephemeral,
    }
    _write_json(about, folder / "checkpoint.json")


def _write_json(value: Mapping[str, Any], file: Path) -> None:
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps(value))
    partial.rename(file)


def _read_about(folder: Path) -> Checkpoint:
    about = json.loads((folder / "checkpoint.json").read_text())
    kind: Kind = "weights" if folder.parent.name == "weights" else "sampler_weights"
    return Checkpoint(
        folder.parent.parent.name,
        kind,
        unquote(folder.name),
        folder,
        datetime.fromisoformat(about["time"]),
        datetime.fromisoformat(about["expires"]) if about["expires"] else None,
        about["ephemeral"],
    )
