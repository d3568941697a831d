"""Pages of the web and books with what parsers have lost."""

from __future__ import annotations

import io
import zipfile

from tests.data.formats.office_parts import Sample

# trafilatura reads pages of more than a few lines; shorter ones are read whole
_LONG = "The rules hold until further notice for all of the wards of the north, and for those of the isles. "
_PARAGRAPH = f"<p>{_LONG * 3}</p>"
_READ = (_LONG * 3).strip()

_MARKS = (
    "<p>The dose is 10<sup>6</sup> units of H<sub>2</sub>O, and 5<sup>1</sup>/<sub>2</sub> cups.</p>"
    "<p>It cost <del>90</del> <ins>70</ins> EUR, as said.<sup><a href='#n1'>1</a></sup></p>"
    "<p><ruby>漢字<rp>(</rp><rt>kanji</rt><rp>)</rp></ruby> and "
    "<math><msup><mi>x</mi><mn>2</mn></msup><mo>=</mo><mfrac><mn>1</mn><mi>y</mi></mfrac></math>.</p>"
    "<ol start='4'><li>Pay at the gate.</li><li>Keep the stub.</li></ol>"
    "<p>See <img src='p.png' alt='a map of the pier'> here.</p>"
)
_MARKS_TEXT = (
    "The dose is 10^6 units of H_2O, and 5 1/2 cups.",
    "It cost ~~90~~ 70 EUR, as said.[1]",
    "漢字(kanji) and x^2 = 1/y.",
    "4. Pay at the gate.",
    "5. Keep the stub.",
    "See [Image: a map of the pier] here.",
)
_TABLE = (
    "<table><caption>Fares of 1987</caption><thead><tr><th rowspan='2'>Boat</th><th colspan='2'>Fare</th>"
    "</tr><tr><th>day</th><th>week</th></tr></thead><tbody><tr><td rowspan='2'>Argo</td><td>5</td>"
    "<td>20</td></tr><tr><td colspan='2'>laid up</td></tr></tbody></table>"
)
_TABLE_TEXT = "| Boat | Fare |  |\n|---|---|---|\n|  | day | week |\n| Argo | 5 | 20 |\n|  | laid up |  |"
_NESTED = (
    "<table><tr><td>Left words<table><tr><th>Berth</th><th>Depth</th></tr><tr><td>A1</td><td>4.5 m</td></tr>"
    "</table></td><td>The right words</td></tr></table>"
)
_HIDDEN = (
    "<p>The gate opens at seven.</p><p hidden>marzipan 0000</p><p style='DISPLAY: none'>marzipan 0001</p>"
    "<div style='visibility:hidden'>marzipan 0002</div><p style='font-size:0'>marzipan 0003</p>"
    "<p style='opacity:0'>marzipan 0004</p><p style='position:absolute;left:-9999px'>marzipan 0005</p>"
    "<p style='color:#fff;background:white'>marzipan 0006</p>"
)
_HIDDEN_WORDS = "marzipan " + " ".join(f"000{n}" for n in range(7))


_TIGHT_TEXT = _TABLE_TEXT.replace("|  |", "| |")  # in pages whose text is read whole


def page(body: str, head: str = "") -> bytes:
    return f"<!doctype html><html><head>{head}</head><body><article>{body}</article></body></html>".encode()


def marks(*, long: bool) -> Sample:
    body = "<h1>Rules</h1>" + (_PARAGRAPH if long else "") + _MARKS
    return Sample(page(body), "\n".join(["Rules", *([_READ] if long else []), *_MARKS_TEXT]))


def grids(*, long: bool) -> Sample:
    body = "<h1>Fares</h1>" + (_PARAGRAPH if long else "") + _TABLE
    lines = ["Fares", *([_READ] if long else []), "Fares of 1987", _TABLE_TEXT if long else _TIGHT_TEXT]
    return Sample(page(body), "\n".join(lines))


def nested() -> Sample:
    text = "Left words\n| Berth | Depth |\n|---|---|\n| A1 | 4.5 m |\nThe right words"
    return Sample(page(_NESTED), text)


def hidden() -> Sample:
    return Sample(page(_HIDDEN), "The gate opens at seven.", "left out: 7 hidden passages", _HIDDEN_WORDS)


def old_label() -> Sample:
    """Labelled iso-8859-1, written in Windows' charset, as every browser reads it."""
    text = "He said “ready” – and it costs 5 €."
    body = page(f"<p>{text}</p>", "<meta charset='iso-8859-1'>").decode()
    return Sample(body.encode("cp1252"), text)


def wide_label() -> Sample:
    """UTF-8 whose label says UTF-16."""
    data = page("<p>Grün, 5 €</p>", "<meta charset='utf-16'>")
    return Sample(data, "Grün, 5 €", "read as utf-8, though labelled utf-16")


def japanese_label() -> Sample:
    """Labelled shift_jis, with characters that only Windows' form of it has."""
    body = page("<p>①㈱山田の髙い本です。</p>", "<meta charset='shift_jis'>").decode()
    return Sample(body.encode("cp932"), "①㈱山田の髙い本です。")


def wrong_label() -> Sample:
    """UTF-8 labelled as an 8-bit charset."""
    data = page("<p>Ceny w złotych: żółta łódź.</p>", "<meta charset='iso-8859-2'>")
    return Sample(data, "Ceny w złotych: żółta łódź.", "read as utf-8, though labelled iso-8859-2")


def book() -> Sample:
    chapters = {"two.xhtml": f"<h1>Fares</h1>{_TABLE}", "one.xhtml": f"<h1>Rules</h1>{_MARKS}{_HIDDEN}"}
    container = (
        '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
        '<rootfile full-path="O/book.opf" media-type="application/oebps-package+xml"/></rootfiles>'
        "</container>"
    )
    items = "".join(f'<item id="{n[:3]}" href="{n}" media-type="application/xhtml+xml"/>' for n in chapters)
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf" version="3.0"><metadata '
        f'xmlns:dc="http://purl.org/dc/elements/1.1/"><dc:title>Harbours</dc:title></metadata><manifest>{items}'
        '</manifest><spine><itemref idref="one"/><itemref idref="two"/></spine></package>'
    )
    files = {"mimetype": "application/epub+zip", "META-INF/container.xml": container, "O/book.opf": package}
    space = "http://www.w3.org/1999/xhtml"
    files |= {
        f"O/{name}": f'<html xmlns="{space}"><body>{body}</body></html>' for name, body in chapters.items()
    }
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # stored, with one date: the same bytes wherever it is made
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
    first = "\n".join(["Rules", *_MARKS_TEXT, "The gate opens at seven."])
    text = f"{first}\n\nFares\nFares of 1987\n{_TIGHT_TEXT}"
    return Sample(out.getvalue(), text, "left out: 7 hidden passages", _HIDDEN_WORDS)


def samples() -> dict[str, Sample]:
    return {
        "marks.html": marks(long=False),
        "marks-long.html": marks(long=True),
        "spans.html": grids(long=False),
        "spans-long.html": grids(long=True),
        "nested.html": nested(),
        "hidden.html": hidden(),
        "label-1252.html": old_label(),
        "label-utf-16.html": wide_label(),
        "label-932.html": japanese_label(),
        "label-wrong.html": wrong_label(),
        "book.epub": book(),
    }
