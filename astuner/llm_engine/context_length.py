"""The context length of a model: the length up to which a token's logits depend only on the tokens before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from astuner.errors import ModelError


def context_length(model_config: Any) -> int | None:
    """Return the maximum number of tokens in a sequence, or None if the model's configuration does not state it.

    The maximum is the number of positions. For longrope (Ding et al. 2024, arXiv:2402.13753), it is the length above
    which different rotary frequencies apply to all tokens of a sequence. Above this length, the logits depend on the
    implementation: transformers selects the frequencies by the longest sequence of a batch and discards cached keys;
    vLLM selects them by the longest sequence that it may serve. A sampler and a trainer therefore agree only up to this
    length.

    Args:
        model_config: a configuration of transformers.
    """
    text_config = model_config.get_text_config()
    positions = getattr(text_config, "max_position_embeddings", None)
    lengths = [positions] if isinstance(positions, int) else []
    return min([*lengths, *_longrope_lengths(text_config)], default=None)


def check_context_length(path: str, max_model_len: int) -> None:
    """Check that the sequences of a run do not exceed the length at which longrope changes its frequencies.

    Args:
        path: a model's folder or Hugging Face name. If its configuration cannot be read, this check does nothing, and
            loading the weights reports the error.
        max_model_len: `rollout.max_model_len`.

    Raises:
        ModelError: `max_model_len` exceeds the length.
    """
    text_config = _text_config(path)
    longest = min(max_model_len, getattr(text_config, "max_position_embeddings", None) or max_model_len)
    limit = min(_longrope_lengths(text_config), default=longest)
    if limit < longest:
        raise ModelError(
            f"model.path {path!r} uses longrope, which changes the rotary frequencies of all tokens if a sequence has "
            f"more than {limit} tokens. Sampling and training would not agree for such sequences, but "
            f"rollout.max_model_len is {max_model_len}. Set rollout.max_model_len: {limit}, or use a model with a "
            "different position encoding"
        )


def shortened_context(path: str, max_model_len: int) -> str | None:
    """Return a notice if the model at `path` has fewer positions than `max_model_len`; otherwise None."""
    limit = context_length(text_config) if (text_config := _text_config(path)) is not None else None
    if limit is None or limit >= max_model_len:
        return None
    return f"rollout.max_model_len is {max_model_len}, and the model has {limit} positions; using {limit}"


def _text_config(path: str) -> Any:
    """Return the configuration of a model's text part; None if it cannot be read, which loading the model reports."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(path).get_text_config()
    # For a damaged file, transformers raises errors of many types.
    except Exception:
        return None


def _longrope_lengths(text_config: Any) -> Iterator[int]:
    """Yield the lengths above which longrope uses its long factors. Layers of different types can have several."""
    parameters = getattr(text_config, "rope_parameters", None) or getattr(text_config, "rope_scaling", None) or {}
    candidates = [parameters, *(value for value in parameters.values() if isinstance(value, Mapping))]
    for rope in candidates:
        if rope.get("rope_type", rope.get("type")) in ("longrope", "su"):
            configured = getattr(text_config, "original_max_position_embeddings", None)
            length = rope.get("original_max_position_embeddings", configured)
            if isinstance(length, int):
                yield length
