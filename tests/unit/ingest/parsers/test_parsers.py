"""Results of each format, through the parsing process that ingestion uses."""

from __future__ import annotations

import codecs
import zipfile
from pathlib import Path
from typing import Any

import pytest

from ragserve.ingest.parsers import Raw, html
from ragserve.ingest.parsing.parse_process import Failed, ParsedFile
from tests.data.formats.make_files import samples
from tests.unit.ingest.ingest_samples import ParseFile, assert_fails, make_docx, make_pdf, text_of

CORPUS = Path(__file__).resolve().parents[4] / "examples" / "corpus" / "files"
ARTICLE = (
    "<p>" + "The lighthouse at Cape Finisterre was built in 1853 "
    "and its beam reaches 23 nautical miles out to sea. " * 4 + "</p>"
)


def test_pdf_chunks_know_their_page_and_never_cross_one(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.pdf"
    path.write_bytes(
        make_pdf(["First page about whales.", "", "Third page about dolphins."], title="Sea mammals")
    )
    result = parse(path)
    assert isinstance(result, ParsedFile)
    assert [(chunk.page, chunk.text.strip()) for chunk in result.chunks] == [
        (1, "First page about whales."),
        (3, "Third page about dolphins."),
    ]
    assert result.title == "Sea mammals"
    assert result.metadata["pages"] == 3


def test_long_pdf_pages_are_cut_within_the_page(parse: ParseFile) -> None:
    result = parse(CORPUS / "germany.pdf")
    assert isinstance(result, ParsedFile)
    pages = [chunk.page for chunk in result.chunks]
    assert pages == sorted(pages, key=lambda page: page or 0)
    assert len(set(pages)) >= 3
    for page in set(pages):
        of_page = "".join(chunk.text for chunk in result.chunks if chunk.page == page)
        assert f"Page {page}" not in of_page


@pytest.mark.parametrize(
    ("name", "fact"),
    [("iceland.md", "Reykjavik"), ("cuba.txt", "Havana"), ("spain.docx", "Madrid"), ("italy.pdf", "Rome")],
)
def test_corpus_documents_hold_their_facts(name: str, fact: str, parse: ParseFile) -> None:
    result = parse(CORPUS / name)
    assert fact in text_of(result)


def test_html_gives_the_article_without_the_page_around_it(parse: ParseFile) -> None:
    result = parse(CORPUS / "france.html")
    text = text_of(result)
    assert isinstance(result, ParsedFile)
    assert result.title == "France"
    assert "Capital - name: Paris" in text
    for boilerplate in ("cookies", "Log in", "newsletter", "Advertise with us", "analytics"):
        assert boilerplate not in text


def test_dates_of_html_are_not_looked_for_in_two_hundred_languages(monkeypatch: pytest.MonkeyPatch) -> None:
    page = (CORPUS / "austria.html").read_bytes()
    monkeypatch.setattr("htmldate.extractors._external_date", lambda text: pytest.fail(f"for {text!r}"))
    assert "Austria" in html.parse(Raw(page, "austria.html", ".html")).text


def test_html_without_an_article_falls_back_to_all_visible_text(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "menu.html"
    path.write_text(
        "<html><head><title>Menu</title></head><body><ul><li>Soup 4.50</li><li>Bread 2.10</li></ul>"
        "<script>x()</script></body></html>"
    )
    result = parse(path)
    assert text_of(result).split("\n") == ["Soup 4.50", "Bread 2.10"]
    assert isinstance(result, ParsedFile)
    assert result.title == "Menu"


def test_html_is_decoded_by_its_meta_charset(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "old.htm"
    head = "<html><head><meta charset='iso-8859-2'><title>t</title></head>"
    page = f"{head}<body><p>Příliš žluťoučký kůň</p>{ARTICLE}</body></html>"
    path.write_bytes(page.encode("iso-8859-2"))
    assert "Příliš žluťoučký kůň" in text_of(parse(path))


def test_deeply_nested_html_does_not_exhaust_the_stack(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "deep.html"
    path.write_text(
        "<html><body>" + "<div>" * 5000 + "bottom of the well" + "</div>" * 5000 + "</body></html>"
    )
    result = parse(path)
    assert isinstance(result, Failed) or "bottom of the well" in text_of(result)
    assert not (isinstance(result, Failed) and result.code == "crash")


def test_docx_keeps_order_headings_tables_and_hidden_corners(tmp_path: Path, parse: ParseFile) -> None:
    from docx.oxml import parse_xml

    w = 'xmlns:w="http://schemas.openxmlformats.org/wordprocessingml/2006/main"'

    def build(document: Any) -> None:
        document.add_heading("Harbour report", level=1)
        document.add_paragraph("Before the table.")
        table = document.add_table(rows=2, cols=2)
        for cell, text in zip(
            (c for row in table.rows for c in row.cells), ("ship", "tons", "Aurora", "512"), strict=True
        ):
            cell.text = text
        last = document.add_paragraph("After the table.")
        text = "<w:p><w:r><w:t>Inside a content control.</w:t></w:r></w:p>"
        control = f"<w:sdt {w}><w:sdtContent>{text}</w:sdtContent></w:sdt>"
        last._p.addnext(parse_xml(control))
        added = "<w:ins><w:r><w:t>added</w:t></w:r></w:ins>"
        tracked = f"<w:p {w}>{added}<w:del><w:r><w:delText>deleted</w:delText></w:r></w:del></w:p>"
        last._p.addprevious(parse_xml(tracked))

    path = tmp_path / "r.docx"
    path.write_bytes(make_docx(build))
    result = parse(path)
    blocks = [
        "# Harbour report",
        "Before the table.",
        "| ship | tons |\n|---|---|\n| Aurora | 512 |",
        "added",
        "After the table.",
        "Inside a content control.",
    ]
    assert text_of(result) == "\n\n".join(blocks)
    assert isinstance(result, ParsedFile)
    assert result.title == "Harbour report"


TOWNS = [[f"Town {n}", f"River {n % 7}", str(n * 317)] for n in range(60)]
TOWN_HEADER = ["town", "river", "people"]


def html_rows(cell: str) -> str:
    head = "".join(f"<{cell}>{text}</{cell}>" for text in TOWN_HEADER)
    rows = "".join("<tr>" + "".join(f"<td>{text}</td>" for text in row) + "</tr>" for row in TOWNS)
    return f"<table><tr>{head}</tr>{rows}</table>"


def word_table(document: Any) -> None:
    table = document.add_table(rows=0, cols=3)
    for row in (TOWN_HEADER, *TOWNS):
        for cell, text in zip(table.add_row().cells, row, strict=True):
            cell.text = text


def page(cell: str) -> bytes:
    body = f"<article><h1>Towns</h1>{ARTICLE}{html_rows(cell)}</article>"
    return f"<html><body>{body}</body></html>".encode()


LONG_TABLES = {
    "th.html": page("th"),
    "td.html": page("td"),
    "bare.html": f"<html><body><p>Towns</p>{html_rows('td')}</body></html>".encode(),
    "table.docx": make_docx(word_table),
    "table.md": "\n".join(["town | river | people", "--- | --- | ---", *map(" | ".join, TOWNS)]).encode(),
}


@pytest.mark.parametrize("name", list(LONG_TABLES))
def test_a_long_table_keeps_its_header_in_every_chunk(name: str, tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / name
    path.write_bytes(LONG_TABLES[name])
    result = parse(path)
    assert isinstance(result, ParsedFile)
    within = [chunk for chunk in result.chunks if "Town " in chunk.text]
    assert len(within) > 3
    for chunk in within:
        before = chunk.text[: chunk.text.index("Town ")].replace(" ", "").replace("|", "")
        assert "townriverpeople\n---------" in before, chunk.text
    assert all(all(cell in text_of(result) for cell in row) for row in TOWNS)
    assert [chunk.header_chars > 0 for chunk in within] == [False] + [True] * (len(within) - 1)


def test_tables_that_arrange_a_page_are_no_tables(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "old.html"
    inner = "<table><tr><td>price</td><td>5</td></tr><tr><td>size</td><td>7</td></tr></table>"
    path.write_text(
        f"<html><body><table><tr><td>Menu</td></tr><tr><td>{inner}</td></tr></table></body></html>"
    )
    text = text_of(parse(path))
    assert text.endswith("\n| price | 5 |\n|---|---|\n| size | 7 |")
    assert "Menu" in text


@pytest.mark.parametrize(
    ("content", "title"),
    [
        ("---\ntitle: From front matter\ntags: [a]\n---\n# Heading\ntext", "From front matter"),
        ("```sh\n# not a heading\n```\n\n# The heading #\n\ntext", "The heading"),
        ("#  A heading in C# ##  \n\ntext", "A heading in C#"),
        ("Underlined C #  \r\n==========  \r\n\r\ntext", "Underlined C #"),
        ("Underlined\n==========\n\ntext", "Underlined"),
        ("---\n: [broken yaml\n---\n# Still found\n", "Still found"),
        ("no heading at all", ""),
    ],
    ids=["front-matter", "fence", "closed", "setext of CRLF", "setext", "broken-front-matter", "none"],
)
def test_markdown_title(content: str, title: str, tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.md"
    path.write_text(content)
    result = parse(path)
    assert isinstance(result, ParsedFile)
    assert result.title == title
    assert text_of(result).strip().endswith(content.rsplit("\n", 1)[-1].strip() or "found")


@pytest.mark.parametrize(
    ("name", "start", "mime"),
    [
        ("page.txt", "<!doctype  html><p>Text.", "text/html"),
        ("page.txt", "<HTML><p>Text.", "text/html"),
        ("notes.md", "# Notes\n", "text/markdown"),
        ("notes.txt", "<p>Text.", "text/plain"),
    ],
)
def test_leading_comments_do_not_delay_a_file(
    name: str, start: str, mime: str, tmp_path: Path, parse: ParseFile
) -> None:
    (tmp_path / name).write_text("<?xml version='1.0'?>\n" + "<!-- a note -->\n" * 60 + start)
    found = parse(tmp_path / name)
    assert isinstance(found, ParsedFile)
    assert found.mime == mime


def test_code_has_its_language(tmp_path: Path, parse: ParseFile) -> None:
    (tmp_path / "a.rs").write_text('fn main() { println!("hi"); }\n')
    (tmp_path / "tool").write_text("#!/usr/bin/env python3\nprint(1)\n")
    rust, script = parse(tmp_path / "a.rs"), parse(tmp_path / "tool")
    assert isinstance(rust, ParsedFile)
    assert isinstance(script, ParsedFile)
    assert (rust.metadata["language"], script.metadata["language"]) == ("rust", "python")
    assert text_of(rust) == 'fn main() { println!("hi"); }\n'


@pytest.mark.parametrize(
    "encoded",
    [
        codecs.BOM_UTF8 + "Überraschung — naïve café".encode(),
        codecs.BOM_UTF16_LE + "Überraschung — naïve café".encode("utf-16-le"),
        codecs.BOM_UTF32_BE + "Überraschung — naïve café".encode("utf-32-be"),
        "Überraschung — naïve café".encode(),
    ],
    ids=["utf-8-bom", "utf-16", "utf-32", "utf-8"],
)
def test_unicode_text_is_decoded_exactly(encoded: bytes, tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(encoded)
    assert text_of(parse(path)) == "Überraschung — naïve café"


def test_legacy_charset_is_recognised(tmp_path: Path, parse: ParseFile) -> None:
    text = (
        "Der Bär läuft über die Straße und grüßt die schöne Köchin. "
        "Das Frühstück war köstlich, sagte der Müller.\n" * 5
    )
    path = tmp_path / "a.txt"
    path.write_bytes(text.encode("cp1252"))
    assert text_of(parse(path)) == text


def test_wrong_extension_is_parsed_by_content(tmp_path: Path, parse: ParseFile) -> None:
    files = {
        "pdf.txt": make_pdf(["Whales sing."]),
        "docx.pdf": make_docx(lambda document: document.add_paragraph("Whales sing.")),
        "html.md": f"<!DOCTYPE html><html><body><p>Whales sing.</p>{ARTICLE}</body></html>".encode(),
        "text.docx": b"Whales sing.",
        "noextension": b"Whales sing.",
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
        text = text_of(parse(tmp_path / name))
        assert "Whales sing." in text
        assert "<" not in text


def bad_files() -> dict[str, tuple[bytes, str, str]]:
    """name -> (content, code, a word of the reason)."""
    pdf = make_pdf(["Whales sing."])
    good_docx = make_docx(lambda document: document.add_paragraph("Whales sing."))
    return {
        "empty.txt": (b"", "empty_document", "0 bytes"),
        "blank.txt": (b" \r\n\t \n" * 50, "empty_document", "empty"),
        "blank.pdf": (make_pdf(["", ""]), "empty_document", "OCR"),
        "blank.html": (b"<html><body><script>1</script></body></html>", "empty_document", "empty"),
        "encrypted.pdf": (make_pdf(["secret"], password="pw"), "encrypted_document", "password"),
        "corrupt.pdf": (b"%PDF-1.7\n" + bytes(range(256)) * 20, "corrupt_document", "corrupt"),
        "headless.pdf": (pdf[400:], "undecodable", "binary"),
        "truncated.docx": (good_docx[: len(good_docx) // 2], "corrupt_document", "corrupt"),
        "image.txt": (b"\x89PNG\r\n\x1a\n" + bytes(100), "not_text", "PNG"),
        "random.txt": (bytes((i * 37 + i // 7) % 256 for i in range(5000)), "undecodable", "undecodable"),
        "lies.txt": (codecs.BOM_UTF8 + b"\xff\xfe\xfa broken", "undecodable", "utf-8"),
        "old.xls": (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600), "unsupported_document", "legacy"),
        "broken.doc": (samples()["words.doc"].data[:9000], "corrupt_document", "save it as .docx"),
        "broken.msg": (samples()["message.msg"].data[:3000], "corrupt_document", "save it as .eml"),
        "locked.docx": (
            b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(600) + "EncryptedPackage".encode("utf-16-le"),
            "encrypted_document",
            "password",
        ),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_bad_file_fails_with_its_reason(name: str, tmp_path: Path, parse: ParseFile) -> None:
    assert_fails(parse, tmp_path / name, *bad_files()[name])


def test_other_zip_containers_are_named(tmp_path: Path, parse: ParseFile) -> None:
    for member, word in (
        ("xl/workbook.bin", "Excel"),
        ("content.xml", "not readable as an OpenDocument file"),
        ("a.txt", "zip archive"),
    ):
        path = tmp_path / "x.docx"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(member, "x")
        result = parse(path)
        assert isinstance(result, Failed)
        assert word in result.reason


def test_a_container_that_unpacks_to_gigabytes_is_refused(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "bomb.zip"
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("content", "w", force_zip64=True) as member,
    ):
        for _ in range(513):
            member.write(bytes(2**20))
    bomb = path.read_bytes()
    for kind, main in (
        ("docx", "word/document.xml"),
        ("xlsx", "xl/workbook.xml"),
        ("pptx", "ppt/presentation.xml"),
        ("epub", "META-INF/container.xml"),
    ):
        path.write_bytes(bomb)
        with zipfile.ZipFile(path, "a") as archive:
            archive.writestr(main, "x")
        result = parse(path)
        assert isinstance(result, Failed)
        assert result.reason == f"the .{kind} unpacks to more than 512 MiB"


def test_a_200_mb_file_is_refused_by_its_size(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "huge.txt"
    with open(path, "wb") as file:
        file.truncate(200 * 2**20)  # sparse: takes no disk
    result = parse(path)
    assert isinstance(result, Failed)
    assert result.code == "too_large"
    assert "209,715,200" in result.reason


def test_long_runs_of_white_space_are_shortened(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "gaps.txt"
    path.write_text("above" + "\n" * 5000 + "below" + " " * 5000 + "right")
    assert text_of(parse(path)) == "above\n\nbelow right"
