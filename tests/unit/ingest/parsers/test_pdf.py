"""PDFs: what line ends, forms, hidden text and repeated lines do to the text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from fpdf import FPDF
from fpdf.enums import TextMode
from PIL import Image

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.page_seams import sentences_over_pages
from ragserve.ingest.parsers import Parsed, Raw, parse
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


def _pdf(build: Callable[[FPDF], object]) -> bytes:
    pdf = FPDF()
    pdf.set_font("Helvetica", size=12)
    pdf.add_page()
    build(pdf)
    return bytes(pdf.output())


def _parsed(data: bytes, **taken: bool) -> Parsed:
    return parse(Raw(data, "a.pdf", ".pdf", **taken))


def test_raised_and_lowered_text_is_marked() -> None:
    def build(pdf: FPDF) -> None:
        for text, place in (
            *(("The dose is 10", "LINE"), ("6", "SUP"), (" units of H", "LINE"), ("2", "SUB")),
            *(
                ("O, as stated", "LINE"),
                ("3", "SUP"),
                (" here, and 2", "LINE"),
                ("-3", "SUP"),
                (" m.\n", "LINE"),
            ),
        ):
            pdf.char_vpos = place
            pdf.write(6, text)
        pdf.set_font("Helvetica", size=24)
        pdf.write(12, "Heading\n")
        pdf.set_font("Helvetica", size=12)
        pdf.write(6, "Text below.")

    assert _parsed(_pdf(build)).text == (
        "The dose is 10^6 units of H_2O, as stated[3] here, and 2^-3 m.\nHeading\nText below."
    )


def test_cells_of_a_row_are_apart() -> None:
    def build(pdf: FPDF) -> None:
        with pdf.table() as table:
            for cells in (("Ship", "Port", "Crew"), ("Vega", "Wick", "9")):
                row = table.row()
                for cell in cells:
                    row.cell(cell)

    assert _parsed(_pdf(build)).text.split("\n") == ["Ship Port Crew", "Vega Wick 9"]


def test_a_footnote_does_not_interrupt_a_sentence_that_goes_on_over_the_page() -> None:
    def build(pdf: FPDF) -> None:
        for size, text, place in (
            (12, "The reserve tank of the pier must be emptied before", "LINE"),
            (12, "1", "SUP"),
            (8, "1", "SUP"),
            (8, " See the rule book, clause 4.", "LINE"),
        ):
            if size < pdf.font_size_pt:
                pdf.set_font_size(size)
                pdf.set_y(260)
            pdf.char_vpos = place
            pdf.write(6, text)
        pdf.set_font_size(12)
        pdf.add_page()
        pdf.write(6, "the ferry comes.")

    found = _parsed(_pdf(build))
    leads = [lead for _, lead in sentences_over_pages(found.text, found.pages)]
    assert leads == ["The reserve tank of the pier must be emptied before[1] "]


def test_heads_of_left_and_right_pages_are_recognised() -> None:
    names = ("one", "two", "three", "four", "five", "six", "seven", "eight")
    pages = [
        f"{'Chapter 3: Fees' if at % 2 else 'Harbour handbook'}\nThe text of page {name} stands here."
        for at, name in enumerate(names)
    ]
    text = _parsed(make_pdf(pages)).text
    assert text.count("Harbour handbook") == text.count("Chapter 3: Fees") == 1
    assert text.count("stands here") == 8


def _white(pdf: FPDF) -> None:
    pdf.set_text_color(255)
    pdf.write(6, "the word is wombat\n")
    pdf.set_text_color(0)


def _invisible(pdf: FPDF) -> None:
    with pdf.local_context(text_mode=TextMode.INVISIBLE):
        pdf.write(6, "the word is wombat\n")


def _tiny(pdf: FPDF) -> None:
    pdf.set_font_size(0.4)
    pdf.write(6, "the word is wombat\n")
    pdf.set_font_size(12)


def _beside(pdf: FPDF) -> None:
    pdf.text(-300, 40, "the word is wombat")


@pytest.mark.parametrize("hide", [_white, _invisible, _tiny, _beside])
def test_text_that_no_reader_sees_is_left_out_and_counted(hide: Callable[[FPDF], None]) -> None:
    def build(pdf: FPDF) -> None:
        pdf.write(6, "The gate opens at seven.\n")
        hide(pdf)
        pdf.write(6, "It closes at nine.")

    found = _parsed(_pdf(build))
    assert "wombat" not in found.text
    assert found.text.split() == ["The", "gate", "opens", "at", "seven.", "It", "closes", "at", "nine."]
    assert found.note == "left out: 1 hidden passages"
    if hide is not _beside:  # PDFium reads pages within their borders
        assert "wombat" in _parsed(_pdf(build), hidden=True).text


def test_white_text_on_a_colour_and_invisible_text_over_an_image_are_read() -> None:
    def build(pdf: FPDF) -> None:
        pdf.set_fill_color(0, 0, 90)
        pdf.set_text_color(255)
        pdf.cell(60, 8, "white on navy", fill=True)
        pdf.image(Image.new("RGB", (40, 40), "white"), x=10, y=60, w=150, h=50)
        pdf.text_mode = TextMode.INVISIBLE
        pdf.text(20, 80, "recognised text")

    found = _parsed(_pdf(build))
    assert found.text.split() == ["white", "on", "navy", "recognised", "text"]
    assert found.note == ""


def _form(*annotations: str, fields: tuple[int, ...] = (), text: str = "") -> bytes:
    """A PDF of one page with annotations, written out; those of ``fields`` are fields of its form."""
    first = 5
    refs = " ".join(f"{first + at} 0 R" for at in range(len(annotations)))
    form = " ".join(f"{first + at} 0 R" for at in fields)
    content = f"BT /F1 12 Tf 50 700 Td ({text}) Tj ET"
    font = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    objects = [
        f"<</Type/Catalog/Pages 2 0 R/AcroForm<</Fields[{form}]/DA(/F1 12 Tf)/DR<</Font<</F1 {font}>>>>>>>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R/Annots[{refs}]"
        f"/Resources<</Font<</F1 {font}>>>>>>",
        f"<</Length {len(content)}>>\nstream\n{content}\nendstream",
        *(
            f"<</Type/Annot/Rect[50 {600 - 40 * at} 250 {620 - 40 * at}]{each}>>"
            for at, each in enumerate(annotations)
        ),
    ]
    body = "".join(f"{number} 0 obj\n{each}\nendobj\n" for number, each in enumerate(objects, 1))
    return f"%PDF-1.7\n{body}trailer\n<</Root 1 0 R/Size {len(objects) + 1}>>\n%%EOF\n".encode("latin-1")


_FIELDS = (
    "/Subtype/Widget/FT/Tx/F 4/T(Licence)/V(KX-4410)",
    "/Subtype/Widget/FT/Tx/F 4/T(form1[0].page[0].Applicant[0])/TU(Name of applicant:)/V(Isla Drever)",
    "/Subtype/Widget/FT/Btn/F 4/T(Insured)/V/Yes/AS/Yes/AP<</N<</Yes null/Off null>>>>",
    "/Subtype/Widget/FT/Btn/F 4/T(Trailer)/V/Off/AS/Off/AP<</N<</Yes null/Off null>>>>",
    "/Subtype/Widget/FT/Ch/Ff 131072/F 4/T(Basin)/V(n)/Opt[[(n)(North)][(s)(South)]]",
    "/Subtype/Widget/FT/Tx/Ff 8192/F 4/T(Pin)/V(wombat)",
    "/Subtype/Widget/FT/Tx/F 4/T(Empty)/V()",
)


def test_form_values_are_lines_with_their_names() -> None:
    found = _parsed(_form(*_FIELDS, fields=tuple(range(len(_FIELDS))), text="Application for a mooring"))
    assert found.text.split("\n") == [
        "Application for a mooring",
        "Licence: KX-4410",
        "Name of applicant: Isla Drever",
        "Insured: yes",
        "Trailer: no",
        "Basin: North",
    ]


def test_annotations_are_read() -> None:
    notes = (
        "/Subtype/FreeText/F 4/Contents(The box says nine)",
        "/Subtype/Text/F 4/T(Morag)/Contents(Check the \\(old\\) rope)",
        "/Subtype/Highlight/F 4/Contents(Important)",
        "/Subtype/Link/F 4/Contents(A link)",
        "/Subtype/Text/F 2/Contents(wombat)",
    )
    data = _form(*notes, text="Harbour rules")
    found = _parsed(data)
    lines = [
        "Harbour rules",
        "The box says nine",
        "[Comment by Morag: Check the (old) rope]",
        "[Comment: Important]",
    ]
    assert found.text.split("\n") == lines
    assert found.note == "left out: 1 hidden passages"
    assert _parsed(data, comments=False).text.split("\n") == lines[:2]
    with pytest.raises(UnsupportedDocument, match="scan"):
        _parsed(_form(notes[1]))


def test_attached_files_are_named() -> None:
    def build(pdf: FPDF) -> None:
        pdf.write(6, "See the file.")
        pdf.embed_file(bytes=b"x", basename="depths.csv")

    assert _parsed(_pdf(build)).text == "See the file.\nAttachments: depths.csv"


def test_a_colour_in_a_form_of_the_page_may_be_behind_white_text() -> None:
    form = "0 0 0.4 rg 0 0 500 500 re f"
    content = "/F0 Do 1 1 1 rg BT /F1 12 Tf 50 700 Td (white on navy) Tj ET"
    font = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>"
    objects = [
        "<</Type/Catalog/Pages 2 0 R>>",
        "<</Type/Pages/Kids[3 0 R]/Count 1>>",
        "<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents 4 0 R"
        f"/Resources<</Font<</F1 {font}>>/XObject<</F0 5 0 R>>>>>>",
        f"<</Length {len(content)}>>\nstream\n{content}\nendstream",
        f"<</Type/XObject/Subtype/Form/BBox[0 0 500 500]/Matrix[1 0 0 1 40 300]/Length {len(form)}>>\n"
        f"stream\n{form}\nendstream",
    ]
    body = "".join(f"{number} 0 obj\n{each}\nendobj\n" for number, each in enumerate(objects, 1))
    found = _parsed(f"%PDF-1.7\n{body}trailer\n<</Root 1 0 R/Size 6>>\n%%EOF\n".encode())
    assert (found.text, found.note) == ("white on navy", "")
