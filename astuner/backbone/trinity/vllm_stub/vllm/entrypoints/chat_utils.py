"""Stub; see `vllm`."""

from typing import Any, Literal

ChatTemplateContentFormat = Literal["string", "openai"]
ConversationMessage = dict[str, Any]


def parse_chat_messages(*_: Any, **__: Any) -> Any:
    """Raise ImportError: the stub parses no messages."""
    raise ImportError("vLLM is not imported: a Tinker service samples in this run, and it does not accept images")


parse_chat_messages_async = parse_chat_messages
