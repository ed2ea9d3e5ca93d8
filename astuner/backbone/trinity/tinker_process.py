"""The Tinker server of a run without GPUs: `astuner serve-tinker`, which ends with the launcher."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from astuner.errors import BackboneError
from astuner.loopback import ADDRESS
from astuner.ports import free_port
from astuner.processes.guarded_process import GuardedProcess

KEY = "tml-local"
"""Any key of that form will do for a server of this machine's."""
_SERVING = re.compile(rb"^serving .* at http://", re.MULTILINE)
_POLL_SECONDS = 0.05
# A run samples from the newest weights and those before them, while requests end.
_SAMPLERS = "3"


@dataclass(frozen=True)
class TinkerServer:
    """A server that was started.

    Attributes:
        url: where it can be asked, once it serves.
        folder: where its checkpoints are.
        log: what it has written.
        process: under its guard.
        key: that it is asked with.
    """

    url: str
    folder: Path
    log: Path
    process: GuardedProcess
    key: str = KEY

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        """Write the model of its weights `weights` as a Hugging Face folder, adapters merged into `base`."""
        from astuner.backbone.trinity.tinker_model import checkpoint_folder, save_model

        save_model(base, checkpoint_folder(self.folder, weights), folder)

    def forget(self, paths: Collection[str]) -> None:
        """Remove weights that it has saved."""
        from astuner.backbone.trinity.tinker_model import forget

        forget(self.folder, paths)

    def wait_until_served(self, patience: float) -> None:
        """Wait until it can be asked.

        Raises:
            BackboneError: it ended, or has not said in time that it can be.
        """
        began = time.monotonic()
        while not _SERVING.search(self.log.read_bytes()):
            self.refuse_ended()
            if time.monotonic() - began > patience:
                raise BackboneError(f"the Tinker server was not there after {patience:.0f} s; see {self.log}")
            time.sleep(_POLL_SECONDS)

    def refuse_ended(self) -> None:
        """Make sure that it lives.

        Raises:
            BackboneError: it does not; with its last words.
        """
        if self.process.exit_code is not None:
            last = self.log.read_text(errors="replace").strip().splitlines()[-1:] or ["nothing"]
            raise BackboneError(
                f"the Tinker server, which trains and samples, ended with exit code {self.process.exit_code}; its last "
                f"words: {last[0]} (more in {self.log}). The same command goes on from the last checkpoint"
            )


@contextlib.contextmanager
def tinker_server(model: str, dtype: str, folder: Path) -> Iterator[TinkerServer]:
    """Start a server for the block.

    Args:
        model: the model's folder.
        dtype: as `model.dtype`.
        folder: where its checkpoints are, and its log.

    Raises:
        ServiceError: it cannot be started.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, port = folder / "server.log", str(free_port())
    argv = [
        sys.executable,
        "-P",
        "-m",
        "astuner",
        "serve-tinker",
        "--model",
        model,
        "--dtype",
        dtype,
        "--device",
        "cpu",
        "--port",
        port,
    ]
    argv += ["--checkpoint-dir", str(folder), "--max-models", "1", "--max-samplers", _SAMPLERS]
    with log.open("wb") as output:
        process = GuardedProcess(argv, Path.cwd(), os.environ, output=output)
    try:
        yield TinkerServer(f"http://{ADDRESS}:{port}", folder, log, process)
    finally:
        process.end()
