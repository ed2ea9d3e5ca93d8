"""A Tinker service that the user names, in place of a server of the run's own."""

from __future__ import annotations

import os
import tarfile
import tempfile
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from astuner.backbone.causal_lm import load_causal_lm
from astuner.errors import ConfigError, ModelError

KEY_VARIABLE = "TINKER_API_KEY"
_TIMEOUT = 600.0


@dataclass(frozen=True)
class TinkerService:
    """The service at `url`, asked with the key of the environment.

    Attributes:
        url: of the `trinity:` section, `model.tinker.base_url`.
        key: for all processes of the run.
    """

    url: str
    key: str

    def wait_until_served(self, patience: float) -> None:
        """Do nothing: it is there or the first request fails."""

    def refuse_ended(self) -> None:
        """Do nothing: what it does shows in its answers."""

    def forget(self, paths: Collection[str]) -> None:
        """Do nothing: what the service keeps is the user's, and is removed there."""

    def save_model(self, base: str, weights: str, folder: Path) -> None:
        """Fetch adapters and write the model that they make, merged.

        Args:
            base: the model's name or folder.
            weights: the service's path of the adapters.
            folder: where to.

        Raises:
            ModelError: they cannot be fetched, or do not fit.
        """
        import httpx
        import tinker

        with tempfile.TemporaryDirectory(prefix="astuner-adapters-") as name:
            archive = Path(name) / "adapters.tar"
            try:
                client = tinker.ServiceClient(base_url=self.url, api_key=self.key).create_rest_client()
                found = client.get_checkpoint_archive_url_from_tinker_path(weights).result().url
                with (
                    httpx.stream("GET", found, timeout=_TIMEOUT, follow_redirects=True) as answer,
                    archive.open("wb") as file,
                ):
                    answer.raise_for_status()
                    for part in answer.iter_bytes():
                        file.write(part)
            except (tinker.TinkerError, httpx.HTTPError) as error:
                raise ModelError(
                    f"the Tinker service did not give the weights {weights}: {type(error).__name__}; they are kept "
                    "there, and can be fetched with its own client"
                ) from error
            save_merged(base, archive, folder)


def save_merged(base: str, archive: Path, folder: Path) -> None:
    """Write a model with the adapters of an archive merged in.

    Args:
        base: the model's name or folder.
        archive: a tar file, compressed or not, with PEFT's `adapter_config.json` and weights.
        folder: where to.

    Raises:
        ModelError: the archive has no adapters, or such as do not fit the model.
    """
    import torch
    from peft import PeftModel

    with tempfile.TemporaryDirectory(prefix="astuner-adapters-") as name:
        try:
            with tarfile.open(archive) as packed:
                packed.extractall(name, filter="data")
            configs = list(Path(name).rglob("adapter_config.json"))
            if len(configs) != 1:
                raise ModelError(f"{archive.name} has {len(configs)} adapter_config.json; expected one")
            adapted = PeftModel.from_pretrained(load_causal_lm(base, torch.float32), str(configs[0].parent))
            adapted.merge_and_unload().save_pretrained(folder)
        except (tarfile.TarError, OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"the adapters in {archive.name} cannot be put into {base}: {error}") from error


def service_key() -> str:
    """Return the key for a service of the user's.

    Raises:
        ConfigError: the environment has none.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key:
        raise ConfigError(
            f"trinity.model.tinker.base_url names a Tinker service, and the environment variable {KEY_VARIABLE} is not "
            "set; export the service's key (any that begins with tml- for `astuner serve-tinker`)"
        )
    return key
