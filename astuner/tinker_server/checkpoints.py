"""Checkpoints on disk, by their `tinker://RUN/weights/NAME` paths.

`FOLDER/RUN/run.json` describes a training run. `FOLDER/RUN/weights/NAME` and `FOLDER/RUN/sampler_weights/NAME` contain
`trained.safetensors`, `checkpoint.json` and, for `weights`, `optimiser.pt`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, unquote

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from astuner.backbone.training.checkpoints import atomic_dir, save_synced
from astuner.backbone.training.tinker_policy import TinkerPolicy
from astuner.errors import RecordError, first_line
from astuner.llm_engine.weight_digests import WeightDigests
from astuner.tinker_server.wire import LoraSettings, TinkerRequestError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
_SCHEME = "tinker://"
_DIGESTS = "digests.json"
_ADVICE = "Free disk space, or start the server with another --checkpoint-dir."


@dataclass(frozen=True)
class TrainingRun:
    """A training run. Its id is its model's id. The client sent the base model's name and the metadata."""

    run_id: str
    base_model: str
    lora: LoraSettings
    policy: TinkerPolicy
    metadata: Mapping[str, Any]
    created: datetime


@dataclass(frozen=True)
class TinkerCheckpoint:
    """A checkpoint of a training run.

    Attributes:
        run_id, kind, name: the parts of its path.
        expires: when it is deleted; None for never.
        ephemeral: whether only its client session can use it and it is deleted with the session.
    """

    run_id: str
    kind: Kind
    name: str
    folder: Path
    time: datetime
    expires: datetime | None = field(compare=False)
    ephemeral: bool
    metadata: Mapping[str, str] = field(compare=False)

    @property
    def path(self) -> str:
        """The `tinker://` path of the checkpoint."""
        return f"{_SCHEME}{self.run_id}/{self.kind}/{self.name}"

    def weights(self) -> dict[str, Tensor]:
        """Read the trained weights.

        Raises:
            TinkerRequestError: the checkpoint was deleted.
            RecordError: the checkpoint cannot be read.
        """
        weights: dict[str, Tensor] = self._read("trained.safetensors", load_file)
        return weights

    def optimizer_state(self) -> dict[str, Any]:
        """Read the optimizer's state; errors as for `weights`."""
        read = partial(torch.load, map_location="cpu", weights_only=True)
        state: dict[str, Any] = self._read("optimiser.pt", read)
        return state

    def digests(self) -> WeightDigests:
        """Read the checksums of all the model's weights; empty for a checkpoint that was saved without them."""
        return _read_json(self.folder / _DIGESTS)

    def _read(self, name: str, read: Callable[[Path], Any]) -> Any:
        if not self.folder.is_dir():
            raise TinkerRequestError(
                f"{self.path} no longer exists: it was deleted, it expired, or newer sampler weights replaced it "
                "(--max-samplers); save the weights again",
                404,
            )
        try:
            return read(self.folder / name)
        # For a corrupt file, PyTorch, pickle and safetensors raise errors of many types.
        except Exception as error:
            raise RecordError(f"{self.path} cannot be read ({first_line(error)}); load another checkpoint") from error


class CheckpointStore:
    """The training runs and checkpoints in one folder. Writes are atomic."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, run_id: str) -> TrainingRun:
        """Return a training run; `TinkerRequestError` if there is no such run."""
        file = self._run_folder(run_id) / "run.json"
        data = {} if run_id.startswith(".") else _read_json(file)
        if not {"base_model", "lora", "metadata", "created"} <= data.keys() or data.get("run_id", run_id) != run_id:
            raise TinkerRequestError(f"there is no training run {run_id!r} in {self.folder}", 404)
        created = datetime.fromisoformat(data["created"])
        # Earlier versions wrote no policy.
        lora, policy = LoraSettings(**data["lora"]), TinkerPolicy(**data.get("policy", {}))
        return TrainingRun(run_id, data["base_model"], lora, policy, data["metadata"], created)

    def has(self, run_id: str) -> bool:
        """Return whether there is a training run with a checkpoint."""
        return (self._run_folder(run_id) / "run.json").is_file()

    def _run_folder(self, run_id: str) -> Path:
        return self.folder / quote(run_id, safe="")

    def runs(self) -> list[TrainingRun]:
        """Return all training runs, the latest first."""
        runs = []
        for file in self.folder.glob("[!.]*/run.json"):
            # A copy of a run under a different name is not a run.
            with contextlib.suppress(TinkerRequestError):
                runs.append(self.run(unquote(file.parent.name)))
        return sorted(runs, key=lambda run: run.created, reverse=True)

    def save(
        self,
        run: TrainingRun,
        kind: Kind,
        name: str,
        weights: Mapping[str, Tensor],
        optimizer_state: dict[str, Any] | None,
        *,
        digests: WeightDigests | None = None,
        ttl_seconds: int | None = None,
        overwrite: bool = False,
        ephemeral: bool = False,
        metadata: Mapping[str, str] | None = None,
    ) -> TinkerCheckpoint:
        """Write a checkpoint.

        Args:
            run: the training run.
            kind, name, ephemeral, metadata: as in `TinkerCheckpoint`.
            weights: the trained weights.
            optimizer_state: the optimizer's state; None to leave it out.
            digests: the checksums of all the model's weights, with which samplers are compared.
            ttl_seconds: seconds until it is deleted.
            overwrite: whether to replace a checkpoint of this name.

        Raises:
            TinkerRequestError: the name exists and `overwrite` is false.
            RecordError: the checkpoint cannot be written.
        """
        run_folder = self._run_folder(run.run_id)
        folder = run_folder / kind / quote(name, safe="")
        if folder.exists() and not overwrite:
            raise TinkerRequestError(
                f"{_SCHEME}{run.run_id}/{kind}/{name} already exists; choose another name, or set overwrite=True"
            )
        now = datetime.now(UTC)
        expires = now + timedelta(seconds=ttl_seconds) if ttl_seconds else None
        checkpoint = TinkerCheckpoint(run.run_id, kind, name, folder, now, expires, ephemeral, metadata or {})
        with atomic_dir(folder, "the checkpoint", _ADVICE) as partial_folder:
            save_file(dict(weights), partial_folder / "trained.safetensors")
            if optimizer_state is not None:
                save_synced(optimizer_state, partial_folder / "optimiser.pt")
            if digests is not None:
                _write_json(digests, partial_folder / _DIGESTS)
            _write_info(checkpoint, partial_folder)
        run_file = run_folder / "run.json"
        if not run_file.exists():
            data = {"base_model": run.base_model, "lora": run.lora.model_dump(), "policy": run.policy.model_dump()}
            data |= {"run_id": run.run_id, "metadata": dict(run.metadata), "created": run.created.isoformat()}
            _write_json(data, run_file)
        return checkpoint

    def find(self, path: str) -> TinkerCheckpoint:
        """Return the checkpoint at a `tinker://` path; `TinkerRequestError` if there is no checkpoint at the path."""
        parts = path.removeprefix(_SCHEME).split("/")
        if path.startswith(_SCHEME) and len(parts) == 3 and parts[1] in KINDS and not parts[0].startswith("."):
            run_id, kind, name = parts
            folder = self._run_folder(run_id) / kind / quote(name, safe="")
            if not name.startswith(".") and (checkpoint := _read_info(folder)) is not None:
                return checkpoint
        raise TinkerRequestError(
            f"there is no checkpoint {path!r} in {self.folder}; paths have the form tinker://RUN/weights/NAME or "
            "tinker://RUN/sampler_weights/NAME",
            404,
        )

    def find_in(self, run_id: str, checkpoint_id: str) -> TinkerCheckpoint:
        """Return a run's checkpoint by `KIND/NAME`, or by its name if only one kind has it.

        Raises:
            TinkerRequestError: there is no such checkpoint, or the name exists in both kinds.
        """
        if "/" in checkpoint_id:
            return self.find(f"{_SCHEME}{run_id}/{checkpoint_id}")
        matches = [checkpoint for checkpoint in self.checkpoints(run_id) if checkpoint.name == checkpoint_id]
        if len(matches) != 1:
            reason = "both kinds have a checkpoint" if matches else "there is no checkpoint"
            raise TinkerRequestError(
                f"{reason} named {checkpoint_id!r} in training run {run_id}; use weights/NAME or sampler_weights/NAME",
                404,
            )
        return matches[0]

    def checkpoints(self, run_id: str | None = None) -> list[TinkerCheckpoint]:
        """Return the checkpoints for one run, or for all runs, the oldest first."""
        run_ids = [run_id] if run_id is not None else [run.run_id for run in self.runs()]
        folders = [self._run_folder(run) / kind for run in run_ids for kind in KINDS]
        files = [file for folder in folders for file in folder.glob("[!.]*/checkpoint.json")]
        found = [checkpoint for file in files if (checkpoint := _read_info(file.parent)) is not None]
        return sorted(found, key=lambda checkpoint: checkpoint.time)

    def delete(self, checkpoint: TinkerCheckpoint) -> None:
        """Delete a checkpoint."""
        shutil.rmtree(checkpoint.folder, ignore_errors=True)

    def set_ttl(self, checkpoint: TinkerCheckpoint, seconds: int | None) -> None:
        """Set a checkpoint's time to live; None for no expiry."""
        expires = datetime.now(UTC) + timedelta(seconds=seconds) if seconds else None
        _write_info(replace(checkpoint, expires=expires), checkpoint.folder)

    def delete_expired(self) -> list[str]:
        """Delete expired checkpoints and return their paths."""
        now = datetime.now(UTC)
        expired = [item for item in self.checkpoints() if item.expires is not None and item.expires <= now]
        for checkpoint in expired:
            self.delete(checkpoint)
        return [checkpoint.path for checkpoint in expired]


def check_adapters(path: str, saved: TrainingRun, run: TrainingRun) -> None:
    """Check that a model for `run` can load the checkpoint at `path`, which a model for `saved` wrote.

    Raises:
        TinkerRequestError: their adapters differ.
    """
    settings = [_adapter_settings(saved), _adapter_settings(run)]
    if settings[0] != settings[1]:
        raise TinkerRequestError(
            f"{path} has the adapters {settings[0]}, but this model has {settings[1]}; create a model with the "
            "checkpoint's settings"
        )


def _adapter_settings(run: TrainingRun) -> dict[str, Any]:
    """Return what the adapters of two runs must have in common for one to load the other's."""
    policy = run.policy.model_dump(exclude={"temperature"}, exclude_defaults=True)
    return run.lora.model_dump(exclude={"seed"}) | (policy if run.lora.rank else {})


def _write_info(checkpoint: TinkerCheckpoint, folder: Path) -> None:
    info = {
        "path": checkpoint.path,
        "time": checkpoint.time.isoformat(),
        "expires": checkpoint.expires.isoformat() if checkpoint.expires else None,
        "ephemeral": checkpoint.ephemeral,
        "metadata": dict(checkpoint.metadata),
    }
    _write_json(info, folder / "checkpoint.json")


def _write_json(value: Mapping[str, Any], file: Path) -> None:
    partial = file.with_name(f".{file.name}")
    partial.write_text(json.dumps(value))
    partial.rename(file)


def _read_json(file: Path) -> dict[str, Any]:
    """Return the object in a file; an empty one if there is none."""
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _read_info(folder: Path) -> TinkerCheckpoint | None:
    """Return the checkpoint in a folder; None for a copy under another name, a link or an incomplete folder."""
    info = _read_json(folder / "checkpoint.json")
    kind: Kind = "weights" if folder.parent.name == "weights" else "sampler_weights"
    try:
        checkpoint = TinkerCheckpoint(
            unquote(folder.parent.parent.name),
            kind,
            unquote(folder.name),
            folder,
            datetime.fromisoformat(info["time"]),
            datetime.fromisoformat(info["expires"]) if info["expires"] else None,
            bool(info["ephemeral"]),
            info.get("metadata", {}),
        )
    except (KeyError, TypeError, ValueError):
        return None
    # Earlier versions did not write the path.
    is_own = info.get("path", checkpoint.path) == checkpoint.path and not folder.is_symlink()
    return checkpoint if is_own and (folder / "trained.safetensors").is_file() else None
