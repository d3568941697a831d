"""Images and scans go through docling where a setting asks for it. The docling here is a stand-in with
the part of its interface that the adapter uses."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers import Raw
from ragserve.ingest.parsers import parse as parse_here
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile, ParseProcess, ParseRequest, Unchanged
from ragserve.ingest.tokenizer import TokenizerSource
from tests.unit.ingest.ingest_samples import ParseFile, make_pdf, places_of

PNG = b"\x89PNG\r\n\x1a\n" + bytes(100)
BASE_MODELS = """
import enum
class ConversionStatus(str, enum.Enum):
    FAILURE, SUCCESS, PARTIAL_SUCCESS = "failure", "success", "partial_success"
class InputFormat(str, enum.Enum):
    PDF, IMAGE = "pdf", "image"
class DocumentStream:
    def __init__(self, *, name, stream):
        self.name, self.stream = name, stream
"""
CONVERTER = """
from types import SimpleNamespace
from docling.datamodel.base_models import ConversionStatus, DocumentStream, InputFormat
class DocumentConverter:
    def __init__(self, *, allowed_formats):
        assert allowed_formats == [InputFormat.PDF, InputFormat.IMAGE]
    def convert(self, source, *, raises_on_error):
        assert isinstance(source, DocumentStream) and not raises_on_error
        data = source.stream.read()
        if b"unreadable" in data:
            errors = [SimpleNamespace(error_message="no such thing")]
            return SimpleNamespace(status=ConversionStatus.FAILURE, errors=errors, document=None)
        def export(*, page_no, image_placeholder, escape_html, escape_underscores):
            return f"{source.name}, page {page_no}\\n\\n| a | b |\\n|---|---|\\n| 1 | 2 |"
        document = SimpleNamespace(pages={1: None, 3: None}, export_to_markdown=export)
        return SimpleNamespace(status=ConversionStatus.SUCCESS, errors=[], document=document)
"""

ParseWithOcr = Callable[[str, bytes], ParsedFile | Unchanged | Failed]


@pytest.fixture(scope="module")
def with_docling(
    tokenizer: TokenizerSource, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ParseWithOcr]:
    folder = tmp_path_factory.mktemp("docling")
    for name, text in {
        "docling/__init__.py": "",
        "docling/datamodel/__init__.py": "",
        "docling/datamodel/base_models.py": BASE_MODELS,
        "docling/document_converter.py": CONVERTER,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join([str(folder), *filter(None, sys.path)]))
        with ParseProcess(
            tokenizer_json=tokenizer.json, chunk_tokens=256, max_bytes=2**20, timeout_s=60, ocr=True
        ) as process:

            def parse(name: str, data: bytes) -> ParsedFile | Unchanged | Failed:
                path = folder / name
                path.write_bytes(data)
                return process.parse(ParseRequest(str(path), name, path.suffix, salt="s"))

            yield parse


def test_images_are_read(with_docling: ParseWithOcr) -> None:
    result = with_docling("photo.txt", PNG)
    assert isinstance(result, ParsedFile)
    assert result.mime == "image/png"
    assert result.note == "text recognised by docling"
    assert places_of(result)[0] == (1, "document.png, page 1\n\n| a | b |\n|---|---|\n| 1 | 2 |")


def test_pages_without_text_are_read_and_pages_with_text_are_not(with_docling: ParseWithOcr) -> None:
    result = with_docling("scan.pdf", make_pdf(["", "", ""]))
    assert [page for page, _ in places_of(result)] == [1, 3]
    assert isinstance(result, ParsedFile)
    assert (result.mime, result.metadata) == ("application/pdf", {"pages": 3})
    assert places_of(with_docling("text.pdf", make_pdf(["Whales sing."]))) == [(1, "Whales sing.")]


def test_what_docling_cannot_read_fails_with_its_reason(with_docling: ParseWithOcr) -> None:
    result = with_docling("bad.png", PNG + b"unreadable")
    assert result == Failed("corrupt: docling cannot read it (no such thing)", "corrupt_document")
    archive = with_docling("a.gz", b"\x1f\x8b" + bytes(100))
    assert isinstance(archive, Failed)
    assert archive.code == "not_text"


@pytest.mark.parametrize("name", ["a.png", "scan.pdf"])
def test_without_docling_or_the_setting_the_message_says_what_to_do(
    name: str, tmp_path: Path, parse: ParseFile
) -> None:
    path = tmp_path / name
    path.write_bytes(PNG if name == "a.png" else make_pdf([""]))
    off = parse(path)
    assert isinstance(off, Failed)
    assert "RAGSERVE_OCR=docling" in off.reason
    assert "pip install 'ragserve[docling]'" in off.reason


def test_without_docling_the_setting_alone_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "docling", None)
    with pytest.raises(UnsupportedDocument, match=r"not installed .* pip install 'ragserve\[docling\]'"):
        parse_here(Raw(PNG, "a.png", ".png"), ocr=True)
