"""Reads documents and divides them into chunks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from zipfile import is_zipfile

from astuner.config.task_sources import DocumentReaderConfig
from astuner.errors import PluginError, TaskDataError, first_line
from astuner.task_reader.dataset_file import find_path

_TEXT = (".txt", ".md", ".markdown")
_CONVERTED = (".pdf", ".docx", ".html", ".htm")
_SENTENCE_END = re.compile(r"(?<=[.!?。！？])\s*")


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a document.

    Attributes:
        source: the name of the file and the number of the chunk.
        text: the text; "" for tasks without a document.
    """

    source: str
    text: str


def read_chunks(config: DocumentReaderConfig, base_dir: Path) -> list[Chunk]:
    """Read the documents of a section and divide them into chunks.

    Args:
        config: section `document_reader`.
        base_dir: the folder for relative paths that do not exist in the working directory.

    Raises:
        PluginError: a document needs markitdown, which is not installed.
        TaskDataError: a document is missing, has an unknown format, or cannot be read or has no text.
    """
    chunks: list[Chunk] = []
    for path in config.document_path:
        for file in _files(find_path(path, base_dir)):
            texts = split_text(_read(file), config.chunk_size)
            if not texts:
                raise TaskDataError(f"{file}: the document has no text; scanned pages need an OCR program first.")
            chunks += [Chunk(f"{file.name}#{number}", text) for number, text in enumerate(texts, 1)]
    return chunks


def _files(path: Path) -> list[Path]:
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.suffix.lower() in (*_TEXT, *_CONVERTED))
        if not files:
            raise TaskDataError(f"{path}: the folder contains no {', '.join((*_TEXT, *_CONVERTED))} file.")
        return files
    if not path.is_file():
        raise TaskDataError(f"{path}: the document does not exist.")
    if path.suffix.lower() not in (*_TEXT, *_CONVERTED):
        supported = ", ".join((*_TEXT, *_CONVERTED))
        raise TaskDataError(f"{path}: cannot read a {path.suffix or 'nameless'} document; supported are {supported}.")
    return [path]


def _read(file: Path) -> str:
    if file.suffix.lower() in _TEXT:
        try:
            return file.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise TaskDataError(f"{file}: cannot be read as UTF-8 text: {error}.") from error
    try:
        from markitdown import MarkItDown, MarkItDownException
    except ModuleNotFoundError as error:
        raise PluginError(
            f"{file} needs package {error.name}, which is not installed: pip install 'astuner[documents]'"
        ) from error
    # markitdown would read a damaged file as plain text.
    suffix = file.suffix.lower()
    if (suffix == ".docx" and not is_zipfile(file)) or (suffix == ".pdf" and b"%PDF-" not in file.read_bytes()[:1024]):
        raise TaskDataError(f"{file}: is not a {file.suffix[1:].upper()} file, or is damaged.")
    try:
        return str(MarkItDown(enable_plugins=False).convert_local(file).markdown)
    except (MarkItDownException, OSError, ValueError) as error:
        raise TaskDataError(f"{file}: cannot be converted to text: {first_line(error)}") from error


def split_text(text: str, size: int) -> list[str]:
    """Divide a text into chunks of at most `size` characters, at paragraphs, or else sentences, words, characters."""
    chunks: list[str] = []
    for piece in _pieces(text, size):
        separator = "\n\n" if piece.begins_paragraph else " "
        if chunks and len(chunks[-1]) + len(separator) + len(piece.text) <= size:
            chunks[-1] += separator + piece.text
        else:
            chunks.append(piece.text)
    return chunks


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    begins_paragraph: bool


def _pieces(text: str, size: int) -> Iterator[_Piece]:
    for paragraph in re.split(r"\n\s*\n", text):
        stripped = paragraph.strip()
        if len(stripped) <= size:
            if stripped:
                yield _Piece(stripped, True)
            continue
        begins = True
        for sentence in _SENTENCE_END.split(stripped):
            words: Sequence[str] = [sentence] if len(sentence) <= size else sentence.split()
            for word in words:
                for start in range(0, len(word), size):
                    yield _Piece(word[start : start + size], begins)
                    begins = False
