"""Converts Python values to strict JSON values, and JSON values back to the dataclasses in `astuner.schema`.

The dataclasses are converted by their annotations, so that a new field needs no change here. The JSON key of a field is
its name, or the `JSON_KEY` in its metadata (see `astuner.schema`).

Long number sequences in the episodes' JSON are columns, little-endian numbers in base64:

    {"dtype": "<u2", "base64": "AQACAAMA…"}

Compared with decimal text, a column has a fifth of the size for logprobs, and is a hundred times as fast. `dtype` is
that of numpy, the smallest that holds all numbers exactly. Short sequences, and all of older versions, are JSON lists.
"""

from __future__ import annotations

import base64
import math
import sys
import threading
import types
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from astuner.errors import RecordError, message_of, text_of
from astuner.schema import JSON_KEY, Packed
from astuner.system.redaction.formats import holds_credential
from astuner.system.redaction.redactor import REDACTED

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
INTEGERS, FLOATS = "iq", "d"
"""Types of number arrays, as `array` names them: the `type_codes` of a column."""
# Shorter sequences are easier to read as a list.
_MIN_LENGTH = 64
_INTEGER_TYPES = ("<u1", "<u2", "<i4", "<i8")
_ARRAYS = {"<u1": "B", "<u2": "H", "<i4": "i", "<i8": "q", "<f4": "f", "<f8": "d"}


def to_jsonable(value: object, redact: Redact) -> object:
    """Return `value` as dicts, lists, strings, integers, finite floats, booleans and None. Never raises.

    Tuples become lists. NaN and infinities become the strings `NaN`, `Infinity` and `-Infinity`. Keys and all other
    objects become their `str`. A value that contains itself, is nested deeper than 100 levels, or raises on `str`
    becomes a short note in angle brackets. `redact` is applied to every text.
    """
    return _to_jsonable(value, redact, [])


def _to_jsonable(value: object, redact: Redact, containers: list[int]) -> object:
    try:
        return _convert(value, redact, containers)
    # The methods of a user's class may raise anything. Ctrl-C arrives in the main thread only.
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
                redact(text_of(key)): REDACTED
                if isinstance(item, str) and isinstance(key, str) and holds_credential(key, item)
                else _to_jsonable(item, redact, containers)
                for key, item in value.items()
            }
        return [_to_jsonable(item, redact, containers) for item in value]
    finally:
        containers.pop()


def encode(value: object, redact: Redact) -> dict[str, Any]:
    """Return a dataclass instance as a dict of JSON values; `redact` is applied to every text.

    Tuples of numbers are copied without checking each number, for speed. If they hold NaN, `dump_json` raises.
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
    # pydantic's TypeAdapter would be faster, but copies shared messages and rejects the unknown literals in records
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


def encode_column(values: Sequence[int] | Sequence[float] | NDArray[Any]) -> object:
    """Return numbers as a JSON value: a column, or a list if they are few or not numbers of numpy."""
    numbers = np.asarray(values)
    if len(numbers) < _MIN_LENGTH or numbers.dtype.kind not in "iuf":
        items = numbers.tolist()
        is_plain = numbers.dtype.kind in "iu" or (numbers.dtype.kind == "f" and bool(np.isfinite(numbers).all()))
        return items if is_plain else to_jsonable(items, str)
    if numbers.dtype.kind == "f":
        with np.errstate(over="ignore"):
            rounded = numbers.astype("<f4")
        numbers = rounded if np.array_equal(rounded, numbers, equal_nan=True) else numbers.astype("<f8")
    else:
        low, high = int(numbers.min()), int(numbers.max())
        fitting = (name for name in _INTEGER_TYPES if np.iinfo(name).min <= low and high <= np.iinfo(name).max)
        numbers = numbers.astype(next(fitting, "<i8"))
    # `dtype.str` names the order of the bytes, except for single bytes.
    name = numbers.dtype.str.replace("|", "<")
    return {"dtype": name, "base64": base64.b64encode(numbers.tobytes()).decode("ascii")}


def decode_column(value: Any, type_codes: str) -> Any:
    """Return the numbers in a JSON value from `encode_column`; other lists are returned as they are.

    Raises:
        KeyError, ValueError: It is no column of these numbers.
    """
    if isinstance(value, dict):
        numbers: array[Any] = array(_ARRAYS[value["dtype"]], base64.b64decode(value["base64"], validate=True))
        if (numbers.typecode in "fd") != (type_codes == FLOATS):
            raise ValueError(f"a column of {value['dtype']}")
        if sys.byteorder == "big":
            numbers.byteswap()
        return packed(numbers)
    for type_code in type_codes:
        try:
            return packed(array(type_code, value))
        except (TypeError, OverflowError):
            continue
    return value


def packed(numbers: array[Any]) -> Packed[Any]:
    """Return the numbers of an array."""
    return Packed([(numbers, 0, len(numbers))])
