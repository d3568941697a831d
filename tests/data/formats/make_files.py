"""Make the small files of this folder. Each has what parsers lose, and the text that must come out.

    python -m tests.data.formats.make_files

They are written by hand, part by part, because the libraries that write such files make few of these
constructs. The test is ``tests/unit/ingest/parsers/test_formats.py``.
"""

from __future__ import annotations

from pathlib import Path

from tests.data.formats import mails, old_words, open_document, outlook, papers, text_files, web_pages
from tests.data.formats.office_parts import Sample, strict
from tests.data.formats.office_sheets import formats, hidden_cells, strict_cells
from tests.data.formats.office_slides import slides
from tests.data.formats.office_words import chart_words, hidden_words, lists, notes, plain, small_words, spans

FOLDER = Path(__file__).parent


def samples() -> dict[str, Sample]:
    """The files of this folder that are made here, by their names."""
    words = plain("docx")
    return {
        "small.docx": small_words(),
        "notes.docx": notes(),
        "spans.docx": spans(),
        "hidden.docx": hidden_words(),
        "lists.docx": lists(),
        "chart.docx": chart_words(),
        "macros.docm": plain("docm"),
        "template.dotx": plain("dotx"),
        "strict.docx": words._replace(data=strict(words.data)),
        "formats.xlsm": formats(),
        "hidden.xlsx": hidden_cells(),
        "strict.xlsx": strict_cells(),
        "slides.pptx": slides("pptx"),
        "show.ppsx": slides("ppsx"),
        "words.odt": open_document.words(),
        "cells.ods": open_document.cells(),
        "slides.odp": open_document.slides(),
        "message.msg": outlook.message(),
        **old_words.samples(),
        **web_pages.samples(),
        **mails.samples(),
        **papers.samples(),
        **text_files.samples(),
    }


if __name__ == "__main__":
    for name, sample in samples().items():
        (FOLDER / name).write_bytes(sample.data)
