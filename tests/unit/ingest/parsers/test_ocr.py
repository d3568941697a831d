"""Images and scans go through docling where a setting asks for it. The docling here is a stand-in with
the part of its interface that the adapter uses."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from ragserve.config import load
from ragserve.errors import UnsupportedDocument
from ragserve.ingest.ingestor import Ingestor
from ragserve.ingest.parsers import Raw
from ragserve.ingest.parsers import parse as parse_here
from ragserve.ingest.parsing.parse_process import Failed
from ragserve_index import IndexStore
from ragserve_index.types import Document, JobItem
from tests.unit.api.scripted_server import WordEmbedder
from tests.unit.ingest.ingest_samples import ParseFile, make_pdf

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

FILES = {
    "photo.txt": PNG,
    "scan.pdf": make_pdf(["", "", ""]),
    "text.pdf": make_pdf(["Whales sing."]),
    "bad.png": PNG + b"unreadable",
    "a.gz": b"\x1f\x8b" + bytes(100),
}


@dataclass
class Read:
    """A document and its chunks, or the state and the reason of a file that has become none."""

    item: JobItem
    document: Document | None
    places: list[tuple[int | None, str]]


@pytest.fixture(scope="module")
def read(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Read]:
    """The files, ingested with the setting and the stand-in."""
    folder = tmp_path_factory.mktemp("ocr")
    for name, text in {
        "docling/__init__.py": "",
        "docling/datamodel/__init__.py": "",
        "docling/datamodel/base_models.py": BASE_MODELS,
        "docling/document_converter.py": CONVERTER,
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "files").mkdir()
    for name, data in FILES.items():
        (folder / "files" / name).write_bytes(data)
    settings = load(data_dir=folder / "data", ocr="docling")
    with pytest.MonkeyPatch.context() as patch, IndexStore(settings.data_dir) as store:
        patch.setenv("PYTHONPATH", ":".join([str(folder), *filter(None, sys.path)]))
        ingestor = Ingestor(settings, store, WordEmbedder())
        job = ingestor.submit_paths("scans", [str(folder / "files")])
        ingestor.run(job.job_id)
        found = {}
        for item in ingestor.jobs.items(job.job_id):
            document = store.document("scans", item.doc_id) if item.doc_id else None
            chunks = store.document_chunks("scans", item.doc_id) if item.doc_id else []
            places = [(chunk.page, chunk.text.strip()) for chunk in chunks]
            found[Path(item.source).name] = Read(item, document, places)
    return found


def test_images_are_read(read: dict[str, Read]) -> None:
    photo = read["photo.txt"]
    assert photo.document is not None
    assert (photo.document.mime, photo.item.reason) == ("image/png", "text recognised by docling")
    assert photo.places[0] == (1, "document.png, page 1\n\n| a | b |\n|---|---|\n| 1 | 2 |")


def test_pages_without_text_are_read_and_pages_with_text_are_not(read: dict[str, Read]) -> None:
    scan = read["scan.pdf"]
    assert scan.document is not None
    assert (scan.document.mime, scan.document.metadata["pages"]) == ("application/pdf", 3)
    assert [page for page, _ in scan.places] == [1, 3]
    assert read["text.pdf"].places == [(1, "Whales sing.")]


def test_what_docling_cannot_read_fails_with_its_reason(read: dict[str, Read]) -> None:
    bad, archive = read["bad.png"].item, read["a.gz"].item
    assert (bad.state, bad.reason) == ("failed", "corrupt: docling cannot read it (no such thing)")
    assert archive.state == "skipped"


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
