"""Converts Python values to strict JSON values, and JSON values back to the dataclasses in `astuner.schema`.

The dataclasses are converted by their annotations, so that a new field needs no change here. The JSON key of a field is
its name, or the `JSON_KEY` in its metadata (see `astuner.schema`).
"""

from __future__ import annotations

import math
import threading
import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from astuner.errors import RecordError, message_of, text_of
from astuner.schema import JSON_KEY, Packed
from astuner.system.redaction import REDACTED, holds_credential

T = TypeVar("T")
Redact = Callable[[str], str]
"""Removes secrets from a text."""
Decode = Callable[[Any], Any]

_MAX_DEPTH = 100
_MAX_INT_BITS = 4096
# Built-in types first: the checks of abstract types are slow.
_CONTAINERS = (dict, list, tuple, Mapping)
_INTEGERS = (int, Integral)
_REALS = (float, Real)


def to_jsonable(value: object, redact: Redact) -> object:
    """Return `value` as dicts, lists, strings, integers, finite floats, booleans and None. Never raises.

    Tuples become lists. NaN and infinities become the strings `NaN`, `Infinity` and `-Infinity`. Keys and all other
    objects become their `str`. A value that contains itself, is nested deeper than 100 levels, or raises on `str`
    becomes a short note in angle brackets.

    Args:
        value: Any object.
        redact: Applied to every text.
    """
    return _to_jsonable(value, redact, [])


def _to_jsonable(value: object, redact: Redact, containers: list[int]) -> object:
    try:
        return _convert(value, redact, containers)
    # The methods of a class of the user may raise anything. Ctrl-C arrives in the main thread only.
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
            raise
        return f"<{type(value).__name__} that cannot be shown>"


def _convert(value: object, redact: Redact, containers: list[int]) -> object:
    if _is_json(value):
        return value
    if isinstance(value, str):
        return redact(str.__str__(value))  # not an instance of a subclass
    if isinstance(value, Packed):
        value = tuple(value)
    # Containers are checked before numbers, whose abstract types are slow to check.
    if isinstance(value, _CONTAINERS):
        return _container_to_jsonable(value, redact, containers)
    if isinstance(value, _INTEGERS):
        # CPython does not write longer integers in decimal.
        integer = int(value)
        return integer if integer.bit_length() <= _MAX_INT_BITS else hex(integer)
    if isinstance(value, _REALS):
        number = float(value)
        if math.isfinite(number):
            return number
        return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
    return redact(text_of(value))


def _is_json(value: object) -> bool:
    """Return whether a value is None, or a built-in number or boolean that JSON represents unchanged.

    Most values are. They are recognised first, because the abstract types of others are slow to check.
    """
    kind = type(value)
    return (
        value is None
        or kind is bool
        or (kind is int and value.bit_length() <= _MAX_INT_BITS)  # type: ignore[attr-defined]
        or (kind is float and math.isfinite(value))  # type: ignore[arg-type]
    )


def _container_to_jsonable(
    value: Mapping[object, object] | list[object] | tuple[object, ...], redact: Redact, containers: list[int]
) -> object:
    if id(value) in containers:
        return "<contains itself>"
    if len(containers) >= _MAX_DEPTH:
        return f"<nested deeper than {_MAX_DEPTH} levels>"
    containers.append(id(value))
    try:
        if isinstance(value, dict | Mapping):
            return {
                redact(text_of(key)): _item_to_jsonable(key, item, redact, containers) for key, item in value.items()
            }
        return [_to_jsonable(item, redact, containers) for item in value]
    finally:
        containers.pop()


def _item_to_jsonable(key: object, item: object, redact: Redact, containers: list[int]) -> object:
    if isinstance(item, str) and isinstance(key, str) and holds_credential(key, item):
        return REDACTED
    return _to_jsonable(item, redact, containers)


def encode(value: object, redact: Redact) -> dict[str, Any]:
    """Return a dataclass instance as a dict of JSON values.

    Tuples of numbers are copied without a check of each number, for speed. If they hold NaN, `dump_json` raises.

    Args:
        value: An instance of a dataclass from `astuner.schema` or the run record.
        redact: Applied to every text.
    """
    cls: Any = type(value)
    return {key: _encode_field(getattr(value, name), redact) for key, name, _ in _codec_fields(cls)}


def _encode_field(value: object, redact: Redact) -> object:
    if _is_json(value):
        return value
    if type(value) is str:
        return redact(value)
    if isinstance(value, Packed):
        return tuple(value)
    if isinstance(value, tuple) and value:
        if type(value[0]) in (int, float):
            return value
        if is_dataclass(value[0]):
            return [encode(item, redact) for item in value]
    return encode(value, redact) if is_dataclass(value) else to_jsonable(value, redact)


def decode(cls: type[T], row: object) -> T:
    """Return the instance of dataclass `cls` from which `encode` made `row`.

    Raises:
        RecordError: If `row` is not valid. The message names the class and the field.
    """
    if not isinstance(row, dict):
        raise RecordError(f"expected an object with the fields of {cls.__name__}, got {str(row)[:60]!r}")
    values = {}
    kind: Any = cls
    for key, name, decode_field in _codec_fields(kind):
        if key in row:
            try:
                values[name] = decode_field(row[key])
            except (TypeError, ValueError, OverflowError) as error:
                raise RecordError(
                    f"{cls.__name__}.{key} cannot be {str(row[key])[:60]!r}: {message_of(error)}"
                ) from error
    try:
        return cls(**values)
    except TypeError as error:
        raise RecordError(f"fields of {cls.__name__} are missing: {error}") from error


@cache
def _codec_fields(cls: Any) -> tuple[tuple[str, str, Decode], ...]:
    """Return the JSON key, name and decoder for each field in a dataclass."""
    hints = get_type_hints(cls)
    return tuple(
        (str(field.metadata.get(JSON_KEY, field.name)), field.name, _decoder(hints[field.name]))
        for field in fields(cls)
    )


def _decoder(hint: Any) -> Decode:
    # pydantic's TypeAdapter would be faster, but copies shared messages and rejects the unknown literals of records
    # that another version of astuner has written.
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: decode(hint, value)
    if hint in (int, float):
        return hint  # type: ignore[no-any-return]  # float("Infinity") is infinite
    origin = get_origin(hint)
    if hint is str or origin is Literal:
        return _decode_text
    if origin is Mapping:
        return _decode_mapping
    if origin is tuple:
        item = get_args(hint)[0]
        # A message that could not be converted was written as a text.
        decode_item = _identity if get_origin(item) is Mapping else _decoder(item)
        return lambda value: tuple(map(decode_item, value))
    if origin in (Union, types.UnionType):
        if any(get_origin(arm) is Packed for arm in get_args(hint)):
            decode_tuple = _decoder(get_args(hint)[0])
            return lambda value: value if value is None or isinstance(value, Packed) else decode_tuple(value)
        (decode_value, *_) = [_decoder(arm) for arm in get_args(hint) if arm is not type(None)]
        return lambda value: None if value is None else decode_value(value)
    return _identity


def _decode_text(value: object) -> str:
    if isinstance(value, list | dict):
        raise TypeError("expected a text")
    return value if isinstance(value, str) else str(value)


def _decode_mapping(value: object) -> object:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return value


def _identity(value: object) -> object:
    return value
