"""The former import path of `astuner.helper_llm.client`."""

from astuner.helper_llm.client import LlmClient, NoAnswer

__all__ = ["LlmClient", "NoAnswer"]
