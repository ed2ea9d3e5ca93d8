"""Stub; see `vllm`."""

from typing import Any

MultiModalDataDict = dict[str, Any]
