"""Immutable sequences of numbers that share their storage."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

T = TypeVar("T", int, float)
Part = tuple[Any, int, int]
"""An array or a `range` with step 1, and the range of its numbers; or a number that is repeated, 0, and how often."""


class Packed(Sequence[T]):
    """An immutable number sequence that equals the tuple with the same numbers.

    It consists of array parts, which other sequences may share, ranges with step 1, and repeated numbers. So
    an episode's prompts, each of which contains the one before, need four bytes per distinct token together. The
    arrays may be extended; the part that a sequence refers to must not change.

    A slice is a tuple. To share the storage, use `view`.
    """

    __slots__ = ("_parts",)

    def __init__(self, parts: Sequence[Part] = ()) -> None:
        """Join parts, which are merged where one continues the one before."""
        # The parts one after the other, because a tuple of tuples needs twice the memory.
        joined: list[Any] = []
        for source, start, end in parts:
            if start >= end:
                continue
            if joined and _is_continued(joined[-3], joined[-1], source, start):
                joined[-1] += end - start
            else:
                joined += (source, start, end)
        self._parts = tuple(joined)

    def parts(self) -> Iterator[Part]:
        """Iterate over the parts."""
        numbers = iter(self._parts)
        return zip(numbers, numbers, numbers, strict=True)

    def view(self, start: int, end: int) -> Packed[T]:
        """Return the numbers from index `start` to before `end`, sharing the storage."""
        parts: list[Part] = []
        offset = 0
        for source, first, last in self.parts():
            low, high = max(start - offset, 0), min(end - offset, last - first)
            if low < high:
                # The same objects where the numbers are the same: an index takes 28 bytes.
                parts.append((source, first + low if low else first, first + high if first + high != last else last))
            offset += last - first
        return Packed(parts)

    def concatenate(self, other: Packed[T]) -> Packed[T]:
        """Return this sequence followed by another one, sharing the storage."""
        return Packed((*self.parts(), *other.parts()))

    def values(self) -> Sequence[T]:
        """Return the numbers in a sequence that is fast to read: a range, or an array."""
        if len(self._parts) == 3 and isinstance(self._parts[0], array | range):
            source, start, end = self._parts
            return source[start:end]  # type: ignore[no-any-return]
        numbers: Any = array(self._type_code())
        for source, start, end in self.parts():
            if not isinstance(source, array | range):
                numbers.extend(array(numbers.typecode, (source,)) * (end - start))
            elif getattr(source, "typecode", "") == numbers.typecode:
                numbers.extend(source[start:end])
            else:
                numbers.extend(array(numbers.typecode, source[start:end]))
        return numbers  # type: ignore[no-any-return]

    def _type_code(self) -> str:
        """Return the type for an array that holds the numbers in all parts."""
        codes = {
            source.typecode if isinstance(source, array) else "d" if isinstance(source, float) else "q"
            for source in self._parts[::3]
        }
        if codes & {"f", "d"}:
            return "d"
        return codes.pop() if len(codes) == 1 else "q"

    def __len__(self) -> int:
        length: int = sum(self._parts[2::3]) - sum(self._parts[1::3])
        return length

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[T, ...]: ...
    def __getitem__(self, index: int | slice) -> T | tuple[T, ...]:
        length = len(self)
        if isinstance(index, slice):
            start, end, step = index.indices(length)
            if step == 1:
                return tuple(self.view(start, end).values())
            return tuple(self.values()[index])
        if not -length <= index < length:
            raise IndexError(f"index {index} is out of range for {length} numbers")
        index %= length
        for source, start, end in self.parts():
            if index < end - start:
                return source[start + index] if isinstance(source, array | range) else source
            index -= end - start
        raise AssertionError

    def __iter__(self) -> Iterator[T]:
        return iter(self.values())

    def count(self, value: object) -> int:
        """Return how often a number occurs."""
        total = 0
        for source, start, end in self.parts():
            is_repeated = not isinstance(source, array | range)
            total += (end - start) * int(source == value) if is_repeated else source[start:end].count(value)
        return total

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """Return the numbers as a numpy array, [N]."""
        import numpy as np

        values = self.values()
        return np.asarray(np.arange(values.start, values.stop) if isinstance(values, range) else values, dtype)

    def __add__(self, other: Sequence[T]) -> tuple[T, ...]:
        return tuple(self.values()) + tuple(other)

    def __radd__(self, other: Sequence[T]) -> tuple[T, ...]:
        return tuple(other) + tuple(self.values())

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Packed):
            if _are_identical(self._parts, other._parts):
                return True
            if len(self) != len(other):
                return False
            left, right = self.values(), other.values()
            if isinstance(left, array) and isinstance(right, array) and left.typecode == right.typecode in "iq":
                return left.tobytes() == right.tobytes()
            return tuple(left) == tuple(right)
        if isinstance(other, tuple):
            return len(self) == len(other) and tuple(self.values()) == other
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self.values()))

    def __repr__(self) -> str:
        return repr(tuple(self.values()))

    def __reduce__(self) -> tuple[Any, ...]:
        # Arrays that several sequences of an object share are pickled once.
        return _from_parts, self._parts


def _from_parts(*parts: Any) -> Packed[Any]:
    numbers = iter(parts)
    return Packed(list(zip(numbers, numbers, numbers, strict=True)))


def _is_continued(source: object, end: int, next_source: object, start: int) -> bool:
    """Return whether the part of `next_source` from `start` on continues a part that ends before `end`."""
    if isinstance(next_source, array | range):
        return source is next_source and end == start
    return type(source) is type(next_source) and source == next_source


def _are_identical(left: tuple[Any, ...], right: tuple[Any, ...]) -> bool:
    """Return whether parts have the same storage. Other parts may have equal numbers."""
    return (
        len(left) == len(right)
        and all(one is other for one, other in zip(left[::3], right[::3], strict=True))
        and left[1::3] == right[1::3]
        and left[2::3] == right[2::3]
    )


def pack_ints(values: Sequence[int]) -> Packed[int]:
    """Return numbers in 4 bytes each.

    Raises:
        OverflowError: If one has more than 32 bits.
    """
    return Packed([(array("i", values), 0, len(values))])


def pack_floats(values: Sequence[float]) -> Packed[float]:
    """Return numbers in 4 bytes each if this changes none of them, and otherwise in 8."""
    exact, rounded = array("d", values), array("f", values)
    short = array("d", rounded) == exact
    return Packed([(rounded if short else exact, 0, len(exact))])


def concatenate(left: tuple[T, ...] | Packed[T], right: tuple[T, ...] | Packed[T]) -> tuple[T, ...] | Packed[T]:
    """Return two sequences one after the other, sharing the storage if both are packed."""
    if isinstance(left, Packed) and isinstance(right, Packed):
        return left.concatenate(right)
    return tuple(left) + tuple(right)


def view_of(values: tuple[T, ...] | Packed[T], start: int, end: int) -> tuple[T, ...] | Packed[T]:
    """Return the numbers from index `start` to before `end`, sharing the storage if they are packed."""
    return values.view(start, end) if isinstance(values, Packed) else values[start:end]


Ints = tuple[int, ...] | Packed[int]
Floats = tuple[float, ...] | Packed[float]
