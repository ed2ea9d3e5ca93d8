"""The Tinker service that trains and samples: a local `astuner serve-tinker` process or the user's own service."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import sys
import tarfile
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import torch
from safetensors.torch import load_file

from astuner.backbone.training.checkpoints import RESUME_HINT
from astuner.backbone.training.tinker_policy import POLICY_EXTENSION, TinkerPolicy
from astuner.backbone.trinity.rules import Device
from astuner.backbone.trinity.training_backends import KEY_VARIABLE, TinkerTrainingBackend
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError, ConfigError, ModelError
from astuner.llm_engine.causal_lm import load_causal_lm
from astuner.processes.guarded_process import GuardedProcess
from astuner.system.localhost import ADDRESS, free_port

LOCAL_KEY = "tml-local"
"""API key for the local server, which accepts any key that starts with `tml-`."""
_READY_LINE = re.compile(rb"^serving .* at http://", re.MULTILINE)
_POLL_SECONDS = 0.05
# The newest weights, and the previous ones while their last requests finish.
_MAX_SAMPLERS = "3"
_DOWNLOAD_TIMEOUT_SECONDS = 600.0
_PROBE_TIMEOUT_SECONDS = 10.0
_PEFT_PREFIX = "base_model.model."


@dataclass(frozen=True)
class LocalTinkerServer(TinkerTrainingBackend):
    """A local `astuner serve-tinker` process, which reads `TinkerPolicy`."""

    folder: Path = field(kw_only=True)
    log: Path = field(kw_only=True)
    process: GuardedProcess = field(kw_only=True)
    key: str = LOCAL_KEY
    takes_policy: bool = True

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        """Write a checkpoint's model as a Hugging Face folder, with adapters merged.

        `weights` is the checkpoint's path, `tinker://RUN/weights/NAME`. Raises as `save_checkpoint_model`.
        """
        save_checkpoint_model(base, checkpoint_folder(self.folder, weights), folder)

    def delete_weights(self, references: Collection[str]) -> None:
        """Delete checkpoints by their `tinker://` paths."""
        for path in references:
            shutil.rmtree(checkpoint_folder(self.folder, path), ignore_errors=True)

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until the server accepts requests; raise BackboneError if it has exited, or after `timeout` seconds."""
        started = time.monotonic()
        while not _READY_LINE.search(self.log.read_bytes()):
            self.check_alive()
            if time.monotonic() - started > timeout:
                raise BackboneError(f"the Tinker server was not ready after {timeout:.0f} s; see {self.log}")
            time.sleep(_POLL_SECONDS)

    def check_alive(self) -> None:
        """Raise BackboneError, with the server's last output, if it has exited."""
        if self.process.exit_code is not None:
            lines = self.log.read_text(errors="replace").strip().splitlines()
            raise BackboneError(
                f"the Tinker server, which trains and samples, exited with code {self.process.exit_code}; its last "
                f"output: {lines[-1] if lines else '(none)'} (log: {self.log}). {RESUME_HINT}"
            )


@contextlib.contextmanager
def local_tinker_server(model: str, config: AstunerConfig, device: Device, folder: Path) -> Iterator[LocalTinkerServer]:
    """Run a local Tinker server during the block. ServiceError: it cannot be started."""
    folder.mkdir(parents=True, exist_ok=True)
    log, port = folder / "server.log", str(free_port())
    argv = [sys.executable, "-P", "-m", "astuner", "serve-tinker", "--model", model, "--dtype"]
    argv += [config.model.dtype]
    argv += ["--device", device, "--port", port, "--checkpoint-dir", str(folder)]
    argv += ["--max-models", "1", "--max-samplers", _MAX_SAMPLERS]
    if device == "cuda":
        # Each engine has a copy of the weights, and the GPU also holds those in training.
        argv += ["--max-engines", "1"]
    with log.open("wb") as output:
        process = GuardedProcess(argv, Path.cwd(), os.environ, output=output)
    try:
        policy, url = TinkerPolicy.from_config(config), f"http://{ADDRESS}:{port}"
        yield LocalTinkerServer(url, policy=policy, device=device, folder=folder, log=log, process=process)
    finally:
        process.end()


def checkpoint_folder(folder: Path, path: str) -> Path:
    """Return the folder of checkpoint `tinker://RUN/weights/NAME` on a server whose checkpoint folder is `folder`."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    return folder / quote(run, safe="") / kind / quote(name, safe="")


@torch.no_grad()
def save_checkpoint_model(base: str, checkpoint: Path, folder: Path) -> None:
    """Write the model of a server's checkpoint folder as a Hugging Face folder, with adapters merged.

    Raises:
        ModelError: the base model cannot be loaded.
        OSError: the checkpoint cannot be read.
    """
    model = load_causal_lm(base, torch.float32)
    trained = load_file(checkpoint / "trained.safetensors")
    weights: dict[str, torch.Tensor] = model.state_dict()
    downs = {name: value for name, value in trained.items() if ".lora_A." in name}
    if downs:
        description = checkpoint.parents[1] / "run.json"
        # Earlier versions wrote no policy.
        policy = json.loads(description.read_text()).get("policy", {}) if description.exists() else {}
        alpha = TinkerPolicy(**policy).lora_alpha
        updated = {}
        for name, down in downs.items():
            up = trained[name.replace(".lora_A.", ".lora_B.")]
            target = f"{name.removeprefix(_PEFT_PREFIX).partition('.lora_A.')[0]}.weight"
            updated[target] = weights[target].float() + alpha / down.shape[0] * (up @ down)
    else:
        updated = trained
    for name, value in updated.items():
        weights[name].copy_(value)
    model.save_pretrained(folder)


@dataclass(frozen=True)
class RemoteTinkerService(TinkerTrainingBackend):
    """A Tinker service set by the user (`trinity.model.tinker.base_url`), which may be an `astuner serve-tinker`.

    If it is down, requests fail. The user manages its checkpoints.
    """

    @classmethod
    def probed(cls, url: str, policy: TinkerPolicy) -> Self:
        """Return the service at an address, which is asked for its capabilities. Without an API key: ConfigError."""
        import httpx

        key, takes_policy = service_key(), False
        with contextlib.suppress(httpx.HTTPError, ValueError, KeyError, TypeError):  # no answer, or another one
            capabilities = httpx.get(
                f"{url.rstrip('/')}/api/v1/get_server_capabilities",
                headers={"X-API-Key": key},
                timeout=_PROBE_TIMEOUT_SECONDS,
            )
            takes_policy = POLICY_EXTENSION in capabilities.json()["extensions"]
        return cls(url, key, takes_policy, policy)

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        """Download a checkpoint's adapters; write the merged model, or raise ModelError if they do not fit it."""
        import httpx
        import tinker

        with tempfile.TemporaryDirectory(prefix="astuner-adapters-") as name:
            archive = Path(name) / "adapters.tar"
            try:
                # Any: this runs in Trinity's environment with tinker 0.20; later versions have no such method.
                client: Any = tinker.ServiceClient(base_url=self.url, api_key=self.key).create_rest_client()
                url = client.get_checkpoint_archive_url_from_tinker_path(weights).result().url
                with (
                    httpx.stream("GET", url, timeout=_DOWNLOAD_TIMEOUT_SECONDS, follow_redirects=True) as response,
                    archive.open("wb") as file,
                ):
                    response.raise_for_status()
                    for chunk in response.iter_bytes():
                        file.write(chunk)
            except (tinker.TinkerError, httpx.HTTPError) as error:
                raise ModelError(
                    f"the weights {weights} could not be downloaded from the Tinker service ({type(error).__name__}); "
                    "the service still has them, and its own client can download them"
                ) from error
            save_merged(base, archive, folder)


def save_merged(base: str, archive: Path, folder: Path) -> None:
    """Merge the PEFT adapters of a tar file into a model, and write it; raise ModelError if that is impossible."""
    from peft import PeftModel

    with tempfile.TemporaryDirectory(prefix="astuner-adapters-") as name:
        try:
            with tarfile.open(archive) as tar:
                tar.extractall(name, filter="data")
            configs = list(Path(name).rglob("adapter_config.json"))
            if len(configs) != 1:
                raise ModelError(f"{archive.name} has {len(configs)} adapter_config.json; expected one")
            adapted = PeftModel.from_pretrained(load_causal_lm(base, torch.float32), str(configs[0].parent))
            adapted.merge_and_unload().save_pretrained(folder)
        except (tarfile.TarError, OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"the adapters in {archive.name} cannot be merged into {base}: {error}") from error


def service_key() -> str:
    """Return the API key for the user's service; raise ConfigError if the environment variable is not set."""
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise ConfigError(
            f"trinity.model.tinker.base_url names a Tinker service, but the environment variable {KEY_VARIABLE} is not "
            "set; export the service's key (for `astuner serve-tinker`, any key that starts with tml-)"
        )
    return key
