"""Fields of dataclasses, read from source files that are not imported."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.backbone.training.declarations import all_fields, declared_classes, field_errors

SOURCE = """
from dataclasses import dataclass, field
from typing import Any, Literal, Optional
raise ImportError("this file must not be imported")

@dataclass
class Base:
    size: int = -1
    inherited: "str | None" = None

@dataclass
class Inner(module.Base):
    dtype: Literal["bfloat16", "float32"] = "float32"
    lists: list[str] = field(default_factory=list)
    free: dict[str, Any] = field(default_factory=dict)

@dataclass
class Outer:
    inner: Optional[Inner] = None
    lr: float = 1e-6
    enabled: bool = False
    either: int | str = 1
    unknown: SomethingElse = None
    def method(self): ...
"""


@pytest.fixture
def errors(tmp_path: Path):
    file = tmp_path / "declared.py"
    file.write_text(SOURCE)
    classes = declared_classes((file, tmp_path / "absent.py"))
    assert list(all_fields(classes, "Inner")) == ["size", "inherited", "dtype", "lists", "free"]
    assert all_fields(classes, "Absent") == {}
    return lambda path, value: list(field_errors(classes, "Outer", ("top",), tuple(path.split(".")), value))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("lr", 1),
        ("lr", None),
        ("enabled", True),
        ("either", "a"),
        ("unknown", object()),
        ("unknown.x", 1),
        ("inner", None),
        ("inner", {"size": 2, "lists": ["a"]}),
        ("inner.size", "${top.lr}"),
        ("inner.inherited", "a"),
        ("inner.dtype", "bfloat16"),
        ("inner.free.any.thing", 1),
    ],
)
def test_values_of_the_declared_types_are_accepted(errors, path: str, value: object):
    assert errors(path, value) == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("lr", "high", ["top.lr is 'high'; expected float"]),
        ("lr", True, ["top.lr is True; expected float"]),
        ("enabled", 1, ["top.enabled is 1; expected bool"]),
        ("either", 1.5, ["top.either is 1.5; expected int or str"]),
        ("lrr", 1, ["unknown key 'top.lrr'; did you mean 'top.lr'?"]),
        ("zzz", 1, ["unknown key 'top.zzz'; the installed Outer has no such field"]),
        ("lr.x", 1, ["unknown key 'top.lr.x'; top.lr is a value, not a section"]),
        ("inner.size", "one", ["top.inner.size is 'one'; expected int"]),
        ("inner.lists", "a", ["top.inner.lists is 'a'; expected list"]),
        (
            "inner.dtype",
            "bfloat61",
            ["top.inner.dtype is 'bfloat61'; expected 'bfloat16' or 'float32'; did you mean 'bfloat16'?"],
        ),
        (
            "inner",
            {"sise": 1, "size": "one", "+inherited": 3},
            [
                "unknown key 'top.inner.sise'; did you mean 'top.inner.size'?",
                "top.inner.size is 'one'; expected int",
                "top.inner.inherited is 3; expected str or None",
            ],
        ),
    ],
)
def test_unknown_names_and_other_types_are_errors(errors, path: str, value: object, expected: list[str]):
    assert errors(path, value) == expected
