from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from astuner.errors import RecordError
from astuner.run_record.files import JsonLines, dump_json, read_json_lines, write_atomically, write_errors

# A file size limit is a disk of that size, as far as one file is concerned.
FULL_DISK = """
import resource, sys
from pathlib import Path
from loguru import logger
from astuner.errors import RecordError
from astuner.run_record.files import JsonLines, write_atomically
logger.remove()
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
folder = Path(sys.argv[1])
try:
    write_atomically(folder / "whole.json", b"x" * 5000)
except RecordError as error:
    print(error)
lines = JsonLines(folder / "rows.jsonl")
try:
    while True:
        lines.append({"text": "y" * 1000})
except RecordError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
lines.append({"text": "after"})
"""


def test_file_is_replaced_atomically_without_a_partial_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "on the way" / "a.json"
    write_atomically(path, b"one")
    write_atomically(path, b"two")
    assert path.read_bytes() == b"two"
    assert [file.name for file in path.parent.iterdir()] == ["a.json"]


def test_full_disk_is_an_error_without_damage(tmp_path: Path) -> None:
    (tmp_path / "whole.json").write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, check=True, timeout=60
    )
    first, second = done.stdout.splitlines()
    assert f"{tmp_path}/whole.json" in first
    assert "File too large" in first
    assert "ulimit -f" in first
    assert f"{tmp_path}/rows.jsonl" in second
    assert (tmp_path / "whole.json").read_bytes() == b"old"
    # The row that did not fit is removed, and later rows are complete.
    texts = [row["text"] for _, row in read_json_lines(tmp_path / "rows.jsonl")]
    assert texts == ["y" * 1000] * 4 + ["after"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.jsonl", "whole.json"]


def test_no_space_left_names_path_reason_and_remedy() -> None:
    with pytest.raises(RecordError, match=r"/dev/full: No space left on device; free some space"):  # noqa: SIM117
        with write_errors(Path("/dev/full")), open("/dev/full", "wb", buffering=0) as full:
            full.write(b"x")


def test_missing_rights_name_path_reason_and_remedy(
    tmp_path: Path, without_rights: Callable[[], AbstractContextManager[None]]
) -> None:
    tmp_path.chmod(0o555)
    try:
        with without_rights(), pytest.raises(RecordError, match=r"a\.json: Permission denied; make it writable"):
            write_atomically(tmp_path / "a.json", b"x")
    finally:
        tmp_path.chmod(0o755)


def test_a_file_where_a_folder_is_needed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(RecordError, match=r"taken.*a file exists where a folder is needed"):
        write_atomically(tmp_path / "taken" / "a.json", b"x")


def test_unknown_reason_still_names_the_path() -> None:
    with pytest.raises(RecordError, match=r"/x/y: .*check that the folder exists"), write_errors(Path("/x/y")):
        raise OSError(errno.EIO, "Input/output error")


def test_rows_are_read_back_and_hostile_text_stays_in_its_line(tmp_path: Path) -> None:
    texts = ["", "a\nb\r\u2028\u2029\x85", "\x00\x1b[31m", "\ud800 alone", "𝄞" * 3, "z" * 1_000_000]
    lines = JsonLines(tmp_path / "rows.jsonl")
    for text in texts:
        lines.append({"text": text})
    lines.close()
    assert [row["text"] for _, row in read_json_lines(tmp_path / "rows.jsonl")] == texts


def test_incomplete_last_line_is_not_read_and_is_removed_on_reopening(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n":1}\n{"n":2')
    assert list(read_json_lines(path)) == [(1, {"n": 1})]
    lines = JsonLines(path)
    lines.append({"n": 3})
    lines.close()
    assert path.read_bytes() == b'{"n":1}\n{"n":3}\n'


def test_rows_can_be_appended_after_others_are_removed(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "rows.jsonl")
    for number in range(5):
        lines.append({"n": number})
    assert lines.retain_rows(lambda row: row["n"] if row["n"] % 2 == 0 else None) == (2, 0)
    assert lines.retain_rows(lambda row: row["n"]) == (0, 0)
    lines.append({"n": 9})
    lines.close()
    assert [row["n"] for _, row in read_json_lines(tmp_path / "rows.jsonl")] == [0, 2, 4, 9]


@pytest.mark.parametrize("line", [b"{oops}", b"[1]", b"\xff\xfe"])
def test_line_that_is_not_an_object_is_an_error(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n":1}\n' + line + b"\n")
    with pytest.raises(RecordError, match=r"rows\.jsonl, line 2: expected a JSON object"):
        list(read_json_lines(path))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"cannot read .*rows\.jsonl: No such file"):
        list(read_json_lines(tmp_path / "rows.jsonl"))


def test_json_is_compact_standard_and_utf8() -> None:
    assert dump_json({"a": [1, "é"]}) == '{"a":[1,"é"]}'.encode()
    assert json.loads(dump_json("\udfff")) == "\udfff"
    with pytest.raises(ValueError, match="JSON compliant"):
        dump_json(float("nan"))
