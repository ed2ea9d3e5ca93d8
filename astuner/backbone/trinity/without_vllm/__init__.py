"""A folder for `sys.path` in which a package stands in for vLLM, where a Tinker service samples.

Trinity imports vLLM for prompts with pictures in every process, whatever samples. vLLM's own import is half of all that
such a process imports, and takes longer than a training step of a small model.
"""

from __future__ import annotations

import sys
from pathlib import Path

FOLDER = Path(__file__).parent


def stand_in() -> None:
    """Have this process, which is to import Trinity and never vLLM, take the stand-in for vLLM."""
    if "vllm" not in sys.modules:
        sys.path.insert(0, str(FOLDER))
        try:
            import vllm.entrypoints.chat_utils  # noqa: F401
        finally:
            sys.path.remove(str(FOLDER))
