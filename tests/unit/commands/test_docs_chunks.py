"""`ragserve docs chunks`, `ragserve ingest --prechunked` and `--preview` as commands."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ragserve_index import IndexStore
from tests.unit.commands.test_ingest import Cli, quick, ragserve

__all__ = ["quick", "ragserve"]  # fixtures
NOTES = "# Lights\n\nThe lamp of Skerryvore was lit in 1884.\n"


@pytest.fixture
def notes(tmp_path: Path, quick: Cli) -> Path:
    path = tmp_path / "notes.md"
    path.write_text(NOTES)
    assert quick("ingest", "notes.md").returncode == 0
    return path


def test_a_chunk_is_corrected_disabled_and_lost(notes: Path, quick: Cli) -> None:
    listed = quick("docs", "chunks", "notes.md")
    assert (
        listed.stdout
        == "0 [0:50], 23 tokens\n    # Lights The lamp of Skerryvore was lit in 1884.\n1 chunk\n"
    )
    edited = quick("docs", "chunks", "notes.md", "0", "--text", "-", stdin=b"It was lit in 1844.\n")
    assert edited.returncode == 0, edited.stderr
    assert edited.stdout.splitlines()[0].endswith("edited")
    assert "It was lit in 1844.\n\n--- text of the file\n# Lights" in edited.stdout
    assert "edited\nIt was lit in 1844." in quick("docs", "show", "notes.md").stdout
    assert quick("docs", "show", "notes.md", "--text").stdout == "It was lit in 1844.\n"
    assert json.loads(quick("ingest", "notes.md", "--json").stdout)["files"]["unchanged"] == 1
    disabled = json.loads(quick("docs", "chunks", "notes.md", "0", "--disable", "--json").stdout)
    assert (disabled["disabled"], disabled["edited"], disabled["chunk_id"]) == (True, True, None)
    assert json.loads(quick("docs", "chunks", "notes.md", "--json").stdout) == [disabled]
    kept = quick("ingest", "notes.md", "--metadata", "shelf=3")
    assert "notes.md: 1 correction of chunks kept" in kept.stdout
    notes.write_text(NOTES.replace("1884", "1844"))
    lost = quick("ingest", "notes.md", "--json")
    ((note),) = json.loads(lost.stdout)["notes"]
    assert note["reason"] == (
        "1 correction of chunks lost, because the file no longer has the text: chunk 0 "
        "(“# Lights The lamp of Skerryvore was lit…”)"
    )
    shown = quick("docs", "chunks", "notes.md", "--lost").stdout
    assert "was disabled, and edited: It was lit in 1844.\n1 lost correction\n" in shown
    assert "forgotten" in quick("docs", "chunks", "notes.md", "--forget-lost").stdout
    assert json.loads(quick("docs", "chunks", "notes.md", "--lost", "--json").stdout) == []


def test_a_correction_is_taken_back(notes: Path, quick: Cli, tmp_path: Path) -> None:
    assert quick("docs", "chunks", "notes.md", "0", "--text", "Wrong.").returncode == 0
    restored = json.loads(quick("docs", "chunks", "notes.md", "0", "--restore", "--enable", "--json").stdout)
    assert (restored["text"], restored["edited"], restored["original"]) == (NOTES, False, None)
    assert quick("docs", "check").returncode == 0
    audit = (tmp_path / "ragserve-data" / "audit" / "audit.jsonl").read_text().splitlines()
    assert json.loads(audit[-1])["chunk"] == 0


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("notes.md", "7"), "has no chunk 7"),
        (("other.md",), "No document 'other.md'"),
        (("notes.md", "--disable"), "Say which chunk"),
        (("notes.md", "0", "--disable", "--enable"), "--disable or --enable"),
        (("notes.md", "0", "--text", "a", "--restore"), "--text or --restore"),
        (("notes.md", "0", "--version", "v"), "--version goes with a change"),
        (("notes.md", "0", "--lost"), "give no number"),
        (("notes.md", "0", "--text", " … "), "needs a letter or a digit"),
        (("notes.md", "0", "--text", "word " * 500), "a chunk has 256 at most"),
        (("notes.md", "0", "--text", "a", "--version", "v"), "was changed meanwhile"),
    ],
)
def test_wrong_use_is_explained(notes: Path, quick: Cli, args: tuple[str, ...], words: str) -> None:
    done = quick("docs", "chunks", *args)
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())


def test_chunks_are_imported(tmp_path: Path, quick: Cli) -> None:
    lines = ['{"document": "a", "text": "One.", "page": 2}', "{broken", '{"document": "b", "text": "Two."}']
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    done = quick("ingest", "--prechunked", "c.jsonl", "-n", "cut", "--label", "hr")
    assert done.returncode == 3
    assert "c.jsonl:2: not JSON" in done.stdout
    assert (
        quick("ingest", "--prechunked", "-", "--name", "d.jsonl", stdin=b'{"text": "Three."}').returncode == 0
    )
    with IndexStore(tmp_path / "ragserve-data") as store:
        written = {document.source: document.labels for document in store.documents("cut")}
        assert written == {"a": ("hr",), "b": ("hr",)}
        assert [document.source for document in store.documents("default")] == ["d.jsonl"]
    for args, words in (
        (("no.jsonl",), "--prechunked takes files"),
        (("c.jsonl", "--prune"), "--prechunked takes files or -"),
        (("https://example.com/c.jsonl",), "--prechunked takes files or -"),
        (("c.jsonl", "--preview"), "leave --prechunked out"),
    ):
        wrong = quick("ingest", "--prechunked", *args)
        assert wrong.returncode != 0
        assert words in " ".join(wrong.stderr.split())


def test_a_preview_stores_nothing(tmp_path: Path, quick: Cli) -> None:
    (tmp_path / "notes.md").write_text(NOTES)
    (tmp_path / "broken.pdf").write_bytes(b"%PDF-1.7 nothing")
    done = quick("ingest", "--preview", "notes.md")
    assert (done.returncode, done.stdout) == (
        0,
        f"notes.md: Lights (text/markdown), 1 chunk, 23 tokens\n\n--- chunk 0 [0:50], 23 tokens\n{NOTES}\n",
    )
    assert not (tmp_path / "ragserve-data").exists()
    done = quick("ingest", "--preview", "broken.pdf", "notes.md", "--json", "--chunk-tokens", "16")
    assert done.returncode == 3
    broken, shown = json.loads(done.stdout)
    assert "corrupt" in broken["error"]
    assert all(chunk["n_tokens"] <= 16 for chunk in shown["chunks"])
    assert len(shown["chunks"]) > 1
    for args, words in ((("nowhere.md",), "takes files"), ((".",), "takes files"), (("-",), "needs a name")):
        wrong = quick("ingest", "--preview", *args)
        assert wrong.returncode != 0
        assert words in " ".join(wrong.stderr.split())


@pytest.mark.parametrize(
    "words",
    [
        ("docs", "ls", "-n", "\udcff"),
        ("docs", "chunks", "\udcff"),
        ("docs", "rm", "\udcff"),
        ("docs", "settings", "\udcff"),
        ("docs", "unanswered", "-n", "\udcff"),
    ],
)
def test_a_name_that_is_not_utf_8_is_refused(notes: Path, quick: Cli, words: tuple[str, ...]) -> None:
    done = quick(*words)
    assert done.returncode == 1
    assert done.stderr.startswith("error: The argument '\\udcff' is not UTF-8")
