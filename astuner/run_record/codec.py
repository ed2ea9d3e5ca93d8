"""Turns the frozen dataclasses of `astuner.schema` into JSON values and back, by their annotations.

Going by the annotations means that a field added to the schema is recorded without a change here.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from astuner.errors import RecordError
from astuner.run_record.plain import Redact, to_plain

T = TypeVar("T")
Encode = Callable[[Any, Redact], object]
Decode = Callable[[Any], Any]


def encode(value: object, redact: Redact) -> dict[str, Any]:
    """Return a dataclass instance as a dict of JSON values, every text redacted.

    Tuples of numbers are passed on unchecked, for speed: should one hold NaN or an infinity, `dump_json` refuses.
    """
    cls: Any = type(value)
    return {name: encoder(getattr(value, name), redact) for name, encoder in _encoders(cls)}


def decode(cls: type[T], row: object) -> T:
    """Return the instance of dataclass `cls` that `encode` made `row` of.

    Raises:
        RecordError: `row` is no such thing; names the class and the field.
    """
    if not isinstance(row, dict):
        raise RecordError(f"expected an object with the fields of {cls.__name__}, got {str(row)[:60]!r}")
    values = {}
    kind: Any = cls
    for name, decoder in _decoders(kind):
        if name in row:
            try:
                values[name] = decoder(row[name])
            except (TypeError, ValueError, OverflowError) as error:
                raise RecordError(f"{cls.__name__}.{name} cannot be {str(row[name])[:60]!r}: {error}") from error
    try:
        return cls(**values)
    except TypeError as error:
        raise RecordError(f"a {cls.__name__} lacks fields: {error}") from error


@cache
def _encoders(cls: Any) -> tuple[tuple[str, Encode], ...]:
    hints = get_type_hints(cls)
    return tuple((field.name, _encoder(hints[field.name])) for field in fields(cls))


@cache
def _decoders(cls: Any) -> tuple[tuple[str, Decode], ...]:
    hints = get_type_hints(cls)
    return tuple((field.name, _decoder(hints[field.name])) for field in fields(cls))


def _encoder(hint: Any) -> Encode:
    if is_dataclass(hint):
        return encode
    item = _tuple_item(hint)
    if item in (int, float):
        return lambda value, _: value
    if is_dataclass(item):
        return lambda value, redact: [encode(one, redact) for one in value]
    if any(map(is_dataclass, get_args(hint))):
        return lambda value, redact: None if value is None else encode(value, redact)
    return to_plain


def _decoder(hint: Any) -> Decode:
    if isinstance(hint, type) and is_dataclass(hint):
        return lambda value: decode(hint, value)
    if hint in (int, float):
        return hint  # type: ignore[no-any-return]  # `hint` is the class itself: float("Infinity") is infinite
    if hint is str or get_origin(hint) is Literal:
        return _text
    if get_origin(hint) is Mapping:
        return _mapping
    item = _tuple_item(hint)
    if item is not None:
        # A message that could not be shown was written as a text.
        decode_item = _as_it_is if get_origin(item) is Mapping else _decoder(item)
        return lambda value: tuple(map(decode_item, value))
    if get_origin(hint) in (Union, types.UnionType):
        inner = [_decoder(arm) for arm in get_args(hint) if arm is not type(None)]
        return lambda value: None if value is None else inner[0](value)
    return _as_it_is


def _text(value: object) -> str:
    if isinstance(value, list | dict):
        raise TypeError("expected a text")
    return value if isinstance(value, str) else str(value)


def _mapping(value: object) -> object:
    if not isinstance(value, dict):
        raise TypeError("expected an object")
    return value


def _as_it_is(value: object) -> object:
    return value


def _tuple_item(hint: Any) -> Any:
    """Return X of `tuple[X, ...]`, None for any other type."""
    return get_args(hint)[0] if get_origin(hint) is tuple else None
