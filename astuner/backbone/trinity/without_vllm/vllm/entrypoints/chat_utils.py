"""See `vllm`."""

from typing import Any, Literal

import vllm.config
import vllm.inputs  # noqa: F401

ChatTemplateContentFormat = Literal["string", "openai"]
ConversationMessage = dict[str, Any]


def parse_chat_messages(*_: Any, **__: Any) -> Any:
    """Not here.

    Raises:
        ImportError: always.
    """
    raise ImportError("vLLM is not loaded: a Tinker service samples, and it takes no pictures")


parse_chat_messages_async = parse_chat_messages
