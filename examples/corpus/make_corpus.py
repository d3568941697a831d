"""Make the example corpus: country profiles of the CIA World Factbook (public domain) as Markdown, HTML,
plain text, PDF and DOCX.

    python examples/corpus/make_corpus.py factbook.jsonl.xz [OUTPUT_FOLDER]

The input has one JSON object per line, {"title": country, "text": "Field: value" lines}. The text is laid
out, not reworded: fields are chosen and grouped under headings, HTML entities are resolved. The same input
gives the same bytes. Needs fpdf2 and python-docx."""

from __future__ import annotations

import html
import io
import json
import lzma
import re
import sys
import zipfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

FORMATS = {
    "md": (
        "Australia",
        "Brazil",
        "Canada",
        "Egypt",
        "Finland",
        "Iceland",
        "India",
        "Kenya",
        "New Zealand",
        "Sweden",
    ),
    "html": (
        "Austria",
        "Chile",
        "Denmark",
        "France",
        "Greece",
        "Ireland",
        "Japan",
        "Madagascar",
        "Norway",
        "Thailand",
    ),
    "txt": ("Belgium", "Cuba", "Estonia", "Ethiopia", "Indonesia", "Mexico", "Nepal", "South Africa"),
    "pdf": ("Croatia", "Germany", "Italy", "Morocco", "Poland", "Switzerland"),
    "docx": ("Mongolia", "Netherlands", "Peru", "Portugal", "Spain", "Vietnam"),
}
SECTIONS = {
    "Introduction": ("Background",),
    "Geography": (
        "Location",
        "Area - total",
        "Area - comparative",
        "Land boundaries - border countries",
        "Coastline",
        "Climate",
        "Terrain",
        "Elevation - highest point",
        "Elevation - lowest point",
        "Natural resources",
        "Major rivers",
    ),
    "People and society": (
        "Population - total",
        "Nationality - noun",
        "Ethnic groups",
        "Languages",
        "Religions",
        "Median age - total",
        "Major urban areas",
        "Life expectancy at birth - total population",
    ),
    "Government": (
        "Country name",
        "Government type",
        "Capital",
        "Independence",
        "Executive branch - chief of state",
        "Executive branch - head of government",
        "Legislative branch - legislature name",
        "Legislative branch - number of seats",
        "National holiday",
        "Flag",
        "National symbol",
        "National color",
        "National anthem(s) - title",
    ),
    "Economy": (
        "Economic overview",
        "GDP (official exchange rate)",
        "Real GDP per capita - Real GDP per capita 2024",
        "Agricultural products",
        "Industries",
        "Unemployment rate - Unemployment rate 2024",
        "Exports - partners",
        "Exports - commodities",
        "Imports - partners",
        "Imports - commodities",
        "Exchange rates - Currency",
    ),
    "Communications, transportation and military": (
        "Internet country code",
        "Internet users",
        "Airports",
        "Ports - key ports",
        "Military and security forces",
    ),
}
SOURCE = "The World Factbook, Central Intelligence Agency. Public domain."
DATE = datetime(2025, 1, 1, tzinfo=UTC)

Profile = dict[str, list[str]]  # section -> "Field: value" lines


def profile(text: str) -> Profile:
    """The chosen fields by section, each once, in the Factbook's order."""
    lines = list(
        dict.fromkeys(re.sub(r"\s+", " ", html.unescape(line)).strip() for line in text.splitlines())
    )
    sections = {
        name: [line for line in lines if line.startswith(fields)] for name, fields in SECTIONS.items()
    }
    return {name: chosen for name, chosen in sections.items() if chosen}


def as_md(title: str, sections: Profile) -> bytes:
    parts = [f"# {title}", f"*{SOURCE}*"]
    for name, lines in sections.items():
        parts.append(f"## {name}")
        parts.extend(
            f"- {line}" if name != "Introduction" else line.removeprefix("Background: ") for line in lines
        )
    return ("\n\n".join(parts) + "\n").encode()


def as_txt(title: str, sections: Profile) -> bytes:
    parts = [f"{title.upper()}\n{SOURCE}"]
    parts.extend(f"{name.upper()}\n" + "\n".join(lines) for name, lines in sections.items())
    return ("\n\n".join(parts) + "\n").encode()


def as_html(title: str, sections: Profile) -> bytes:
    """A page as sites have them: navigation, a cookie notice, a sidebar and a footer around the article."""
    escaped = html.escape(title)
    menu = "".join(
        f'<li><a href="/{name.lower().replace(" ", "-")}">{html.escape(name)}</a></li>'
        for name in FORMATS["html"]
    )
    body = []
    for name, lines in sections.items():
        body.append(f"<section><h2>{html.escape(name)}</h2>")
        body.extend(f"<p>{html.escape(line)}</p>" for line in lines)
        body.append("</section>")
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>{escaped} - The World Factbook</title>
<meta property="og:title" content="{escaped}">
<style>nav li {{ display: inline }} .cookie {{ position: fixed; bottom: 0 }}</style>
<script>window.analytics = {{ track: function () {{ return "page view"; }} }};</script>
</head>
<body>
<header><a href="/">Country profiles</a>
<nav><ul>{menu}<li><a href="/login">Log in</a></li>\
<li><a href="/subscribe">Subscribe to our newsletter</a></li></ul></nav></header>
<div class="cookie" role="dialog">We use cookies to improve your experience. \
<button>Accept all</button> <button>Reject</button></div>
<main><article>
<h1>{escaped}</h1>
{chr(10).join(body)}
</article></main>
<aside><h3>Popular today</h3><ul><li><a href="/ads">Advertise with us</a></li>\
<li><a href="/quiz">Take the flag quiz</a></li></ul></aside>
<footer>{html.escape(SOURCE)} <a href="/privacy">Privacy</a> <a href="/imprint">Imprint</a> \
<a href="#top">Back to top</a></footer>
</body>
</html>
"""
    return page.encode()


def as_pdf(title: str, sections: Profile) -> bytes:
    """Several pages with a running header and page numbers, in a core font: characters beyond Windows-1252
    lose their accents.
    """
    from fpdf import FPDF

    class Pages(FPDF):
        def header(self) -> None:
            self.set_font("Helvetica", "I", 9)
            self.cell(0, 8, f"The World Factbook: {title}", new_x="LMARGIN", new_y="NEXT")

        def footer(self) -> None:
            self.set_y(-15)
            self.set_font("Helvetica", "I", 9)
            self.cell(0, 8, f"Page {self.page_no()}", align="C")

    pdf = Pages(format=(148, 210))
    pdf.set_creation_date(DATE)
    pdf.set_title(title)
    pdf.set_author("Central Intelligence Agency")
    pdf.core_fonts_encoding = "windows-1252"
    pdf.add_page()
    pdf.set_font("Helvetica", "B", 18)
    pdf.cell(0, 12, title, new_x="LMARGIN", new_y="NEXT")
    for name, lines in sections.items():
        pdf.set_font("Helvetica", "B", 13)
        pdf.cell(0, 10, name, new_x="LMARGIN", new_y="NEXT")
        pdf.set_font("Helvetica", "", 10)
        for line in lines:
            pdf.multi_cell(0, 5, _windows_1252(line), new_x="LMARGIN", new_y="NEXT")
            pdf.ln(1.5)
    return bytes(pdf.output())


def _windows_1252(text: str) -> str:
    import unicodedata

    def simplest(char: str) -> str:
        if char.encode("cp1252", "ignore"):
            return char
        return unicodedata.normalize("NFKD", char).encode("ascii", "ignore").decode()

    return "".join(simplest(char) for char in text)


def as_docx(title: str, sections: Profile) -> bytes:
    """Headings, paragraphs and, where a section is short facts, a two-column table."""
    import docx

    document = docx.Document()
    properties = document.core_properties
    properties.title, properties.author, properties.comments = title, "Central Intelligence Agency", SOURCE
    properties.created = properties.modified = DATE.replace(tzinfo=None)
    document.add_heading(title, level=0)
    for name, lines in sections.items():
        document.add_heading(name, level=1)
        if name.startswith("Communications"):
            table = document.add_table(rows=0, cols=2)
            for line in lines:
                field, _, value = line.partition(": ")
                cells = table.add_row().cells
                cells[0].text, cells[1].text = field, value
        else:
            for line in lines:
                document.add_paragraph(line)
    raw = io.BytesIO()
    document.save(raw)
    return _without_times(raw.getvalue())


def _without_times(data: bytes) -> bytes:
    """The zip container again with one fixed date on all members."""
    out = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(data)) as source,
        zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for name in source.namelist():
            target.writestr(
                zipfile.ZipInfo(name, DATE.timetuple()[:6]), source.read(name), zipfile.ZIP_DEFLATED
            )
    return out.getvalue()


WRITERS: dict[str, Callable[[str, Profile], bytes]] = {
    "md": as_md,
    "html": as_html,
    "txt": as_txt,
    "pdf": as_pdf,
    "docx": as_docx,
}


def main(source: str, folder: str) -> None:
    with lzma.open(source, "rt", encoding="utf-8") as file:
        texts = {entry["title"]: entry["text"] for entry in map(json.loads, file)}
    out = Path(folder)
    out.mkdir(parents=True, exist_ok=True)
    for ext, titles in FORMATS.items():
        for title in titles:
            name = title.lower().replace(" ", "-")
            (out / f"{name}.{ext}").write_bytes(WRITERS[ext](title, profile(texts[title])))


if __name__ == "__main__":
    if len(sys.argv) not in {2, 3}:
        sys.exit(__doc__)
    main(sys.argv[1], sys.argv[2] if len(sys.argv) == 3 else str(Path(__file__).parent / "files"))
