"""The files of ``tests/data/formats``: what each says is what is read."""

from __future__ import annotations

import io
from typing import Any

import docx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.ingest.parsers import Raw, parse
from tests.data.formats.make_files import FOLDER, Sample, samples
from tests.data.formats.text_files import METADATA
from tests.unit.ingest.parsers.table_texts import table_in, written

SAMPLES = samples()


@pytest.mark.parametrize("name", list(SAMPLES))
def test_what_a_file_says_is_what_is_read(name: str) -> None:
    sample: Sample = SAMPLES[name]
    data = (FOLDER / name).read_bytes()
    assert data == sample.data, "run python -m tests.data.formats.make_files"
    ext = name[name.rindex(".") :]
    found = parse(Raw(data, name, ext))
    assert found.text == sample.text
    assert found.note == sample.note
    assert METADATA.get(name, {}).items() <= found.metadata.items()
    assert not [word for word in sample.absent.split() if word in found.text]
    everything = parse(Raw(data, name, ext, hidden=True))
    # the other words of Office files are in deleted parts
    hidden = [word for word in sample.absent.split() if not word.isalpha() or word == "marzipan"]
    assert all(word in everything.text for word in hidden)


@pytest.mark.parametrize("name", ["notes.docx", "slides.pptx", "formats.xlsm"])
def test_comments_may_be_left_out(name: str) -> None:
    found = parse(Raw(SAMPLES[name].data, name, "", comments=False))
    assert "Comment" not in found.text
    assert "1 comments" in found.note


CELL = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8)


@given(st.lists(st.lists(CELL, min_size=2, max_size=2), min_size=2, max_size=4))
def test_a_table_of_a_word_document_comes_back_cell_for_cell(rows: list[list[str]]) -> None:
    document: Any = docx.Document()
    table = document.add_table(rows=len(rows), cols=2)
    for at, row in enumerate(rows):
        for place, text in enumerate(row):
            table.cell(at, place).text = text
    out = io.BytesIO()
    document.save(out)
    if any(cell.strip() for row in rows for cell in row):
        assert table_in(parse(Raw(out.getvalue(), "a.docx", ".docx")).text) == written(rows)
