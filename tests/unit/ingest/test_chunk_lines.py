"""Import of documents that came in chunks: JSON lines through the ingestor, and what each bad line costs."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any

import pytest

from ragserve.config import Settings, load
from ragserve.errors import InvalidRequest, TooLarge, TooManyRequests
from ragserve.ingest import chunk_lines
from ragserve.ingest.chunk_lines import (
    MOST_AT_ONCE,
    MOST_BAD,
    MOST_CHUNKS,
    MOST_DOCUMENTS,
    CutDocument,
    read_lines,
)
from ragserve.ingest.ingestor import Ingestor, Upload
from ragserve.ingest.jobs.job_report import JobReport
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore

MB = 2**20


def lines(*values: Any) -> bytes:
    return b"\n".join(value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)


def run(ingestor: Ingestor, data: bytes, name: str = "chunks.jsonl", **metadata: Any) -> JobReport:
    job = ingestor.submit_chunks("n", [Upload(name, io.BytesIO(data))], metadata)
    return ingestor.run(job.job_id)


def read(data: bytes, max_bytes: int = MB) -> tuple[list[Any], list[tuple[str, str]]]:
    return read_lines([("f.jsonl", io.BytesIO(data))], max_bytes=max_bytes)


def test_lines_become_the_chunks_of_their_documents(ingestor: Ingestor, store: IndexStore) -> None:
    data = lines(
        {"document": "a", "title": "A", "text": "The second chunk.\n", "page": 2, "order": 2},
        {"document": "b", "text": "  Alone  with its    gaps.", "section": "Methods"},
        {"document": "a", "text": "The first chunk.", "page": 1, "order": 1, "metadata": {"lang": "en"}},
        {"document": "b", "text": "More.", "section": "Results"},
        {"document": "b", "text": "More of methods.", "section": "Methods"},
    )
    report = run(ingestor, data, shelf=3)
    assert (report.progress.indexed, report.failures, report.notes) == (2, (), ())
    a, b = store.find_source("n", "a"), store.find_source("n", "b")
    assert a is not None
    assert b is not None
    assert (a.title, a.metadata["lang"], a.metadata["shelf"]) == ("A", "en", 3)
    chunks = store.document_chunks("n", a.doc_id)
    assert [(c.text, c.page, c.page_kind) for c in chunks] == [
        ("The first chunk.", 1, "page"),
        ("The second chunk.\n", 2, "page"),
    ]
    assert [(c.start, c.end, c.header_chars) for c in chunks] == [(0, 16, 0), (18, 36, 0)]
    assert all(chunk.n_tokens > 0 for chunk in chunks)
    assert [(c.text, c.page_kind, c.page_name) for c in store.document_chunks("n", b.doc_id)] == [
        ("  Alone  with its    gaps.", "section", "Methods"),
        ("More.", "section", "Results"),
        ("More of methods.", "section", "Methods"),
    ]
    assert run(ingestor, data, shelf=3).progress.unchanged == 2
    again = run(ingestor, lines({"document": "b", "text": "Changed."}))
    assert (again.progress.indexed, len(store.documents("n"))) == (1, 2)


def test_a_file_without_names_is_one_document(ingestor: Ingestor, store: IndexStore) -> None:
    run(ingestor, b"\xef\xbb\xbf" + lines({"text": "One."}, b"", {"text": "Two.", "page": 3, "section": "S"}))
    (document,) = store.documents("n")
    assert document.source == "chunks.jsonl"
    chunks = store.document_chunks("n", document.doc_id)
    assert [(c.page, c.page_name) for c in chunks] == [(None, None), (3, "S")]


BAD: list[tuple[Any, str]] = [
    (b"{", "not JSON"),
    (b"[" * 100_000, "not JSON|nested too deeply"),
    (b'{"text": "\xff"}', "not UTF-8"),
    ([1], "not an object"),
    ({"document": "x"}, "text: Field required"),
    ({"text": ""}, "text: "),
    ({"text": " \u200b…"}, "text: has no letter and no digit"),
    ({"text": 7}, "text: Input should be a valid string"),
    ({"text": "a", "page": 0}, "page: "),
    ({"text": "a", "page": "3"}, "page: "),
    ({"text": "a", "page": 10**400}, "page: "),
    ({"text": "a", "order": 10**400}, "order"),
    (b'{"text": "a", "order": 1e999}', "order"),
    (b'{"text": "a", "order": NaN}', "order"),
    ({"text": "a", "document": "../.."}, "The name"),
    ({"text": "a", "document": "d" * 2000}, "document: "),
    ({"text": "a", "metadata": {"k": {"deep": 1}}}, "metadata"),
    ({"text": "a", "metadata": {"k": 2**70}}, "metadata"),
    ({"text": "a", "metadata": {"k": "\0"}}, "metadata"),
    ({"text": "a", "metadata": {"k": "\ud800"}}, "metadata|document"),
    ({"text": "a", "metadata": {str(i): i for i in range(65)}}, "metadata"),
    ({"text": "a" * 2**22}, "longer than 4,194,304 bytes"),
]


def test_a_bad_line_costs_that_line(ingestor: Ingestor, store: IndexStore) -> None:
    good = {"document": "good", "text": "A good line."}
    report = run(ingestor, lines(*(each for bad, _ in BAD for each in (good, bad)), good))
    (document,) = store.documents("n")
    assert document.n_chunks == len(BAD) + 1
    failed = dict(report.failures)
    for place, (_, said) in enumerate(BAD):
        reason = failed.pop(f"chunks.jsonl:{2 * place + 2}")
        assert any(part in reason for part in said.split("|")), (reason, said)
    assert not failed
    assert report.state == "done"


def test_chunks_over_the_limit_are_left_out_and_named(ingestor: Ingestor, store: IndexStore) -> None:
    long = "Every word of this chunk counts. " * 200
    report = run(ingestor, lines({"text": "Short."}, {"text": long}, {"document": "l", "text": long}))
    (note,) = report.notes
    assert note[1] == "1 chunks of more than 256 tokens (chunk_tokens) left out: numbers 1, from 0"
    (failed,) = report.failures
    assert failed[0] == "l"
    assert "chunk_tokens" in failed[1]
    (document,) = store.documents("n")
    assert document.n_chunks == 1


def test_what_is_left_out_is_noted(ingestor: Ingestor, store: IndexStore) -> None:
    report = run(
        ingestor,
        lines(
            {"text": "One.", "id": 1, "embedding": [0.1], "metadata": {"lang": "en", "kind": "a"}},
            {"text": "Two.", "metadata": {"lang": "en", "kind": "b"}},
            {"text": "Three.", "metadata": {"kind": "a", "late": True}},
        ),
    )
    ((_, note),) = report.notes
    assert note == (
        "metadata that differs between chunks of a document left out: kind; unknown fields left out: "
        "embedding, id"
    )
    (document,) = store.documents("n")
    assert (document.metadata["lang"], document.metadata["late"]) == ("en", True)
    assert "kind" not in document.metadata


def test_a_document_remembers_so_many_fields(ingestor: Ingestor, store: IndexStore) -> None:
    """Its lines may each bring others."""
    many = [
        {
            "text": f"Text {n}.",
            "metadata": {f"m{n}-{i}": i for i in range(60)},
            **{f"x{n}-{i}": 1 for i in range(60)},
        }
        for n in range(6)
    ]
    ((_, note),) = run(ingestor, lines(*many)).notes
    assert "metadata beyond 256 fields left out: m4-16, " in note
    assert "unknown fields left out: x0-0, " in note
    (document,) = store.documents("n")
    assert 256 <= len(document.metadata) < 256 + 20, "with those of the file itself"


def test_many_sections_keep_their_numbers(ingestor: Ingestor, store: IndexStore) -> None:
    report = run(ingestor, lines(*({"text": f"Text {n}.", "section": f"S{n}"} for n in range(201))))
    assert "names of sections left out: 201 places" in report.notes[0][1]
    (document,) = store.documents("n")
    last = store.document_chunks("n", document.doc_id)[-1]
    assert (last.page, last.page_kind, last.page_name) == (201, "section", None)


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (MOST_BAD, MOST_DOCUMENTS, MOST_CHUNKS, MOST_AT_ONCE) == (1_000, 10_000, 250_000, 2)
    three = [(f"f{n}.jsonl", io.BytesIO(lines({"text": "a" * 400}))) for n in range(3)]
    with pytest.raises(TooLarge, match=r"With 'f2.jsonl' the import is larger than 1,000 bytes"):
        read_lines(three, max_bytes=1_000)
    with pytest.raises(TooLarge):
        read(lines(*({"text": "a" * 50} for _ in range(100))), max_bytes=1_000)
    with pytest.raises(TooLarge):
        read(b'{"text": "' + b"a" * 100_000, max_bytes=1_000)
    monkeypatch.setattr(chunk_lines, "MOST_BAD", 3)
    _, bad = read(lines({"text": "Good."}, *[b"{"] * 10))
    assert [place for place, _ in bad] == ["f.jsonl:2", "f.jsonl:3", "f.jsonl:4", "7 more lines"]
    monkeypatch.setattr(chunk_lines, "MOST_CHUNKS", 4)
    with pytest.raises(TooLarge, match="more than 4 chunks"):
        read(lines(*({"text": "a", "document": f"d{n % 2}"} for n in range(5))))
    monkeypatch.setattr(chunk_lines, "MOST_DOCUMENTS", 2)
    with pytest.raises(TooLarge, match="more than 2 documents"):
        read(lines(*({"text": "a", "document": f"d{n}"} for n in range(3))))


def test_one_document_at_a_time_is_made_and_stored(
    ingestor: Ingestor, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, stored = CutDocument.stream, list[int]()

    def noted(self: CutDocument) -> Any:
        stored.append(len(list(ingestor.spool.root.glob("*/*.bin"))))
        return stream(self)

    monkeypatch.setattr(CutDocument, "stream", noted)
    data = lines(*({"text": "One.", "document": f"d{n}"} for n in range(4)))
    ingestor.submit_chunks("n", [Upload("f.jsonl", io.BytesIO(data))])
    assert stored == [0, 1, 2, 3]


class SentWith(io.BytesIO):
    """A file during which another is sent."""

    def __init__(self, data: bytes, send: Callable[[], object]) -> None:
        super().__init__(data)
        self._send = send

    def readline(self, size: int | None = -1, /) -> bytes:
        self._send()
        return super().readline(size)


def test_two_imports_at_a_time(ingestor: Ingestor) -> None:
    def send(*rest: Callable[[], object]) -> None:
        file = SentWith(lines({"text": "One."}), rest[0]) if rest else io.BytesIO(lines({"text": "One."}))
        ingestor.submit_chunks("n", [Upload("f.jsonl", file)])

    send(send)
    with pytest.raises(TooManyRequests) as refused:
        send(lambda: send(send))
    assert refused.value.code == "imports_busy"
    send(send)  # whatever became of the others


@pytest.mark.parametrize(
    ("chunk", "n", "escaped"),
    [
        ({"text": "灯台の光は霧の夜に遠くまで届く。"}, 20, False),
        ({"text": "a"}, 80, False),
        ({"text": "😀 a", "section": "灯台", "\udc00": 1}, 20, True),
    ],
    ids=["Japanese", "tiny", "escaped"],
)
def test_what_is_within_the_limit_is_taken(
    settings: Settings, store: IndexStore, embedder: Embedder, chunk: dict[str, Any], n: int, escaped: bool
) -> None:
    """A document is no larger as the job reads it than its lines were."""
    data = b"\n".join([json.dumps(chunk, ensure_ascii=escaped).encode()] * n)
    most = load(data_dir=settings.data_dir, max_upload_bytes=len(data) + 100)
    report = run(Ingestor(most, store, embedder), data)
    assert (report.progress.indexed, report.failures) == (1, ())
    (document,) = store.documents("n")
    assert document.n_chunks == n


@pytest.mark.parametrize("data", [b"", b"\n\n", b"plain text", b"\x00\x01"])
def test_a_file_without_a_chunk_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(data)
    assert refused.value.code == "no_chunks"


def test_nothing_is_left_of_a_refused_import(ingestor: Ingestor) -> None:
    with pytest.raises(InvalidRequest):
        ingestor.submit_chunks("n", [Upload("f.jsonl", io.BytesIO(b"{"))])
    assert ingestor.jobs.list() == []
    assert not ingestor.spool.root.is_dir() or not list(ingestor.spool.root.iterdir())
