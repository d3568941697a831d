"""PDFs: what line ends, forms, hidden text and repeated lines do to the text."""

from __future__ import annotations

import pytest

from ragserve.ingest.parsers import Raw, parse
from ragserve.ingest.parsers.pdf_lines import mended
from tests.unit.ingest.ingest_samples import make_pdf

_CUT = "\x02"  # PDFium's mark


@pytest.mark.parametrize(
    "text",
    [
        *("a price-determining body", "a well-known lawyer", "the self-employed pilots", "twenty-one boats"),
        *("part AB-4410 is", "RX-7", "F-16", "X-ray", "non-EU", "Smith-Jones", "state-of-the-art"),
        *("see https://example.org/long-path/file.", "ask anne-marie@example.org now", "mother-in-law"),
        *("www.some-harbour.example", "lib/some-name"),
    ],
)
def test_hyphens_of_the_text_stay_at_line_ends(text: str) -> None:
    assert mended([text.replace("-", _CUT)]) == [text]
    assert mended([text.replace("-", f"{_CUT}\n")]) == [text]


def test_hyphens_of_line_ends_go() -> None:
    assert mended(["The infor\x02mation is deter\x02mining, 2019-\n2020."]) == [
        "The information is determining, 2019-\n2020."
    ]
    assert mended(["infor-\nmation", "soft\xadware"]) == ["information", "software"]
    # what the document shows elsewhere decides
    assert mended(["the lee\x02board", "A leeboard."])[0] == "the leeboard"
    assert mended(["the lee\x02board", "A lee-board. A leeboard."])[0] == "the lee-board"
    assert mended(["an e\x02mail", "An e-mail."])[0] == "an e-mail"
    assert mended(["INFOR\x02MATION", "All information"])[0] == "INFORMATION"


def test_hyphens_in_a_file() -> None:
    text = "The committee has a price-determining body. " * 40 + "Part AB-4410, non-EU. " * 20
    found = parse(Raw(make_pdf([text]), "a.pdf", ".pdf")).text
    assert " ".join(found.split()) == text.strip()


def test_short_lines_are_not_joined() -> None:
    for text in ("apples\npears\ntotal depth", "sat\nclosed\nprice\n(eur)"):
        assert mended([text]) == [text]
    long = "The ferry leaves the pier at nine in the morning, and comes\nback at five in the evening"
    assert mended([long]) == [long.replace("\n", " ")]


@pytest.mark.parametrize(
    ("given", "title"),
    [("untitled", ""), ("Document1", ""), ("Microsoft Word - Fees.docx", "Fees.docx"), ("Tides", "Tides")],
)
def test_titles_made_up_by_programs(given: str, title: str) -> None:
    assert parse(Raw(make_pdf(["Whales sing."], title=given), "a.pdf", ".pdf")).title == title
