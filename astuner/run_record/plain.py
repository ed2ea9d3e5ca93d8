"""Turns any Python value into what strict JSON can hold, without secrets."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Integral, Real

Redact = Callable[[str], str]

_MAX_DEPTH = 100
_MAX_INT_BITS = 4096
_CONTAINERS = (dict, list, tuple, Mapping)
_INTEGERS = (int, Integral)
_REALS = (float, Real)


def to_plain(value: object, redact: Redact) -> object:
    """Return `value` made of dict, list, str, int, finite float, bool and None only, every text redacted.

    What JSON can hold stays equal to itself, except that tuples become lists. NaN and infinities become the strings
    `NaN`, `Infinity` and `-Infinity`; keys and all other objects become their `str`; what contains itself, is nested
    deeper than 100 levels or cannot be shown becomes a short note in angle brackets. Never raises.
    """
    return _plain(value, redact, [])


def _plain(value: object, redact: Redact, containers: list[int]) -> object:
    if isinstance(value, str):
        return redact(value)
    if value is None or isinstance(value, bool):
        return value
    # Containers before numbers, and built-in types before abstract ones, whose checks are slow.
    if isinstance(value, _CONTAINERS):
        return _plain_container(value, redact, containers)
    if isinstance(value, _INTEGERS):
        # CPython refuses to write longer ones in decimal.
        integer = int(value)
        return integer if integer.bit_length() <= _MAX_INT_BITS else hex(integer)
    if isinstance(value, _REALS):
        return _finite(float(value))
    return redact(_shown(value))


def _plain_container(
    value: Mapping[object, object] | list[object] | tuple[object, ...], redact: Redact, containers: list[int]
) -> object:
    if id(value) in containers:
        return "<contains itself>"
    if len(containers) >= _MAX_DEPTH:
        return f"<nested deeper than {_MAX_DEPTH} levels>"
    containers.append(id(value))
    try:
        if isinstance(value, Mapping):
            return {redact(_shown(key)): _plain(item, redact, containers) for key, item in value.items()}
        return [_plain(item, redact, containers) for item in value]
    # A mapping of the user's or the model's making may do anything when read; the record must go on.
    except Exception:
        return _unshowable(value)
    finally:
        containers.pop()


def _finite(number: float) -> float | str:
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"


def _shown(value: object) -> str:
    if isinstance(value, str):
        return value
    try:
        return str(value)
    # So may its `__str__`.
    except Exception:
        return _unshowable(value)


def _unshowable(value: object) -> str:
    return f"<{type(value).__name__} that cannot be shown>"
