"""A folder for `sys.path` with a stub of vLLM, for runs in which a Tinker service samples.

Trinity imports vLLM in every process, for prompts with images. Importing vLLM takes half of a process's import time,
and longer than a small model's training step.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

STUB_FOLDER = Path(__file__).parent


def import_vllm_stub() -> None:
    """Import the stub as `vllm` in this process, unless vLLM is already imported."""
    if "vllm" not in sys.modules:
        sys.path.insert(0, str(STUB_FOLDER))
        try:
            for module in ("vllm.config", "vllm.entrypoints.chat_utils", "vllm.inputs"):
                importlib.import_module(module)
        finally:
            sys.path.remove(str(STUB_FOLDER))
