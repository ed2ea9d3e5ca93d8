"""Reading one YAML file: values, lines, and calm errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from astuner.config.yaml_file import read_yaml
from astuner.errors import ConfigError

Write = Callable[..., Path]


def test_values_and_lines(write: Write) -> None:
    file = read_yaml(write("a:\n  b: 1e-6\n  c:\n    - x\n    - {d: 2024-01-01}\ne: [1,\n  2]\n"))
    assert file.tree == {"a": {"b": 1e-6, "c": ["x", {"d": "2024-01-01"}]}, "e": [1, 2]}
    assert file.lines == {
        ("a",): 1,
        ("a", "b"): 2,
        ("a", "c"): 3,
        ("a", "c", "0"): 4,
        ("a", "c", "1"): 5,
        ("a", "c", "1", "d"): 5,
        ("e",): 6,
        ("e", "0"): 6,
        ("e", "1"): 7,
    }


def test_merged_keys_have_the_line_that_they_come_from(write: Write) -> None:
    file = read_yaml(write("a: &base\n  x: 1\nb:\n  <<: *base\n  y: 2\n"))
    assert file.tree["b"] == {"x": 1, "y": 2}
    assert (file.lines[("b", "x")], file.lines[("b", "y")]) == (2, 5)


def test_where_names_the_key_or_what_is_around_it(write: Write) -> None:
    path = write("a:\n  b: 1\n")
    file = read_yaml(path)
    assert file.where(("a", "b")) == f"{path}:2"
    assert file.where(("a", "z", "y")) == f"{path}:1"
    assert file.where(("z",)) == str(path)


@pytest.mark.parametrize("text", ["", "# nothing\n", "---\n"])
def test_an_empty_file_is_an_empty_mapping(write: Write, text: str) -> None:
    assert read_yaml(write(text)).tree == {}


ANCHORS_IN_ANCHORS = "a0: &a0 [x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 9)}]\n" for level in range(1, 9)
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [1\nb: 2\n", r":2, column 2: not valid YAML: while parsing a flow sequence, expected ',' or '\]'"),
        ("a:\n\tb: 1\n", r":2, column 1: the line is indented with a tab"),
        ("a: 1\na: 2\n", r":2, column 1: 'a' is twice in the same section"),
        ("a: 'x\n", r":2, column 1: not valid YAML: .*unexpected end of stream"),
        ("a: 1\n---\nb: 2\n", r":2, column 1: not valid YAML: expected a single document"),
        ("- a\n", r":1: expected `key: value` lines, starting with `astuner:`"),
        ("a: '${x'\n", r":1: a is not a valid \$\{…\} reference"),
        ("a:\n  b: [1, '${x']\n", r":2: a.b\[1\] is not a valid \$\{…\} reference"),
        ("a: &x {b: *x}\n", "contains itself"),
        ("a: \x01\n", "run.yaml: unacceptable character"),
        ("a:\n  on: 1\n", r":2: the key 'on' is a Boolean in YAML; write it in quotes"),
        ("a:\n  b: ???\n", r":2: a.b is \?\?\?, which stands for a missing value"),
        ("~: 1\n", r":1: the key '~' is empty in YAML; write it in quotes"),
        ("a:\n  ? \n  : 1\n", r":2: the key 'null' is empty in YAML"),
        ("a: !!float x\n", "run.yaml: not valid YAML: could not convert string to float: 'x'"),
        ("a: !!set {b}\n", r":1: a has a value of a type that a configuration cannot have"),
        (f"a: {'[' * 2000}{']' * 2000}\n", "nested too deeply"),
        (ANCHORS_IN_ANCHORS, r": the file has more than 100,000 values"),
    ],
)
def test_an_invalid_file_is_an_error_with_its_place(write: Write, text: str, message: str) -> None:
    path = write(text)
    with pytest.raises(ConfigError, match=message) as raised:
        read_yaml(path)
    assert str(raised.value).startswith(str(path))


def test_missing_file_names_the_nearest_beside_it(write: Write, tmp_path: Path) -> None:
    write("", {"math_agent": ""})
    (tmp_path / "notes.txt").touch()
    for name in ("math_agnt.yaml", "math_agent.yml", "math_agent"):
        with pytest.raises(ConfigError, match=rf"^no file .*{name}; did you mean .*math_agent\.yaml\?$"):
            read_yaml(tmp_path / name)
    with pytest.raises(ConfigError, match=r"^no file \S+qqqqqq\.toml$"):
        read_yaml(tmp_path / "qqqqqq.toml")


def test_missing_folder_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"there is no folder .*nowhere$"):
        read_yaml(tmp_path / "nowhere" / "run.yaml")


def test_folder_and_binary_file_are_reported(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a folder; expected a YAML file"):
        read_yaml(tmp_path)
    (tmp_path / "model.yaml").write_bytes(b"abc\xff\xfe")
    with pytest.raises(ConfigError, match=r"is not UTF-8 text \(byte 3\)"):
        read_yaml(tmp_path / "model.yaml")


def test_a_byte_order_mark_is_not_part_of_the_first_key(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("a: 1\n", encoding="utf-8-sig")
    assert read_yaml(tmp_path / "run.yaml").tree == {"a": 1}
