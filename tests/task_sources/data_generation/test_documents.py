"""Documents: their formats and their chunks."""

from __future__ import annotations

from pathlib import Path
from zipfile import ZipFile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astuner.config.task_sources import DocumentReaderConfig
from astuner.errors import TaskDataError
from astuner.task_sources.data_generation.questions import read_chunks, split_text

PDF = b"""%PDF-1.4
1 0 obj<</Type/Catalog/Pages 2 0 R>>endobj
2 0 obj<</Type/Pages/Kids[3 0 R]/Count 1>>endobj
3 0 obj<</Type/Page/Parent 2 0 R/MediaBox[0 0 300 100]/Contents 4 0 R/Resources<</Font<</F 5 0 R>>>>>>endobj
4 0 obj<</Length 42>>stream
BT /F 12 Tf 10 50 Td (Owls fly at night.) Tj ET
endstream endobj
5 0 obj<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>endobj
trailer<</Root 1 0 R>>
"""


OPC = "http://schemas.openxmlformats.org/package/2006"
OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
MAIN = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
DOCX = {
    "[Content_Types].xml": f'<Types xmlns="{OPC}/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    '<Override PartName="/word/document.xml" ContentType='
    '"application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"/></Types>',
    "_rels/.rels": f'<Relationships xmlns="{OPC}/relationships">'
    f'<Relationship Id="r" Type="{OFFICE}" Target="word/document.xml"/></Relationships>',
    "word/document.xml": f'<w:document xmlns:w="{MAIN}"><w:body><w:p><w:r><w:t>Owls hear well.</w:t></w:r></w:p>'
    "</w:body></w:document>",
}


@given(st.text(alphabet="ab .。\n", max_size=400), st.integers(5, 60))
def test_chunks_are_short_and_lose_nothing(text: str, size: int) -> None:
    chunks = split_text(text, size)
    assert all(0 < len(chunk) <= size for chunk in chunks)
    assert "".join("".join(chunks).split()) == "".join(text.split())


def test_paragraphs_stay_together() -> None:
    assert split_text("One. Two.\n\nThree.\n\nFour.", 18) == ["One. Two.\n\nThree.", "Four."]


def read(*paths: Path) -> list[str]:
    config = DocumentReaderConfig(document_path=[str(path) for path in paths])
    return [chunk.text for chunk in read_chunks(config, Path.cwd())]


def test_text_and_markdown_need_no_converter(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\ufeffEulen fliegen nachts.", encoding="utf-8")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.md").write_text("# Owls")
    (tmp_path / "b" / "ignored.bin").write_text("x")
    assert read(tmp_path) == ["Eulen fliegen nachts.", "# Owls"]


def test_pdf_docx_and_html(tmp_path: Path) -> None:
    pytest.importorskip("markitdown")
    (tmp_path / "a.pdf").write_bytes(PDF)
    (tmp_path / "b.html").write_text("<html><body><h1>Owls</h1><p>They fly.</p></body></html>")
    with ZipFile(tmp_path / "c.docx", "w") as archive:
        for name, content in DOCX.items():
            archive.writestr(name, content)
    assert read(tmp_path) == ["Owls fly at night.", "# Owls\n\nThey fly.", "Owls hear well."]
    for name in ("broken.docx", "broken.pdf"):
        (tmp_path / name).write_bytes(b"PK neither")
        with pytest.raises(TaskDataError, match="or is damaged"):
            read(tmp_path / name)


def test_bad_documents(tmp_path: Path) -> None:
    for name, content, problem in (
        ("a.xyz", b"", "cannot read a .xyz document; supported are .txt"),
        ("a.txt", b"\xff\xfe\xff", "cannot be read as UTF-8"),
        ("b.txt", b" \n", "the document has no text"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(TaskDataError, match=problem):
            read(tmp_path / name)
    with pytest.raises(TaskDataError, match="the document does not exist"):
        read(tmp_path / "missing.txt")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TaskDataError, match="the folder contains no"):
        read(tmp_path / "empty")
