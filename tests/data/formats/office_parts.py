"""Containers of Office files, and a chart that all of them may hold."""

from __future__ import annotations

import io
import re
import zipfile
from typing import NamedTuple

_XML = '<?xml version="1.0" encoding="UTF-8"?>'
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006"
NAMESPACES = " ".join(
    f'xmlns:{prefix}="{uri}"'
    for prefix, uri in {
        "w": "http://schemas.openxmlformats.org/wordprocessingml/2006/main",
        "s": "http://schemas.openxmlformats.org/spreadsheetml/2006/main",
        "p": "http://schemas.openxmlformats.org/presentationml/2006/main",
        "a": "http://schemas.openxmlformats.org/drawingml/2006/main",
        "c": "http://schemas.openxmlformats.org/drawingml/2006/chart",
        "m": f"{_OFFICE}/math",
        "r": f"{_OFFICE}/relationships",
        "mc": "http://schemas.openxmlformats.org/markup-compatibility/2006",
    }.items()
)
_MAIN = {
    "docx": ("word/document.xml", "openxmlformats-officedocument.wordprocessingml.document.main"),
    "docm": ("word/document.xml", "ms-word.document.macroEnabled.main"),
    "dotx": ("word/document2.xml", "openxmlformats-officedocument.wordprocessingml.template.main"),
    "xlsx": ("xl/workbook.xml", "openxmlformats-officedocument.spreadsheetml.sheet.main"),
    "xlsm": ("xl/workbook.xml", "ms-excel.sheet.macroEnabled.main"),
    "pptx": ("ppt/presentation.xml", "openxmlformats-officedocument.presentationml.presentation.main"),
    "ppsx": ("ppt/presentation.xml", "openxmlformats-officedocument.presentationml.slideshow.main"),
}


class Sample(NamedTuple):
    """A file, the text and the note of the job's report that must come out, and words that must not."""

    data: bytes
    text: str
    note: str = ""
    absent: str = ""


def package(kind: str, main: str, parts: dict[str, str], links: dict[str, dict[str, str]]) -> bytes:
    """A container: ``links`` gives, for each part, the kinds of its relations and their targets. The id of a
    relation is its kind."""
    path, content_type = _MAIN[kind]
    override = f'<Override PartName="/{path}" ContentType="application/vnd.{content_type}+xml"/>'
    types = "http://schemas.openxmlformats.org/package/2006/content-types"
    files = {
        "[Content_Types].xml": f'<Types xmlns="{types}">'
        f'<Default Extension="xml" ContentType="application/xml"/>{override}</Types>',
        path: main,
        **parts,
    }
    for source, targets in {"": {"officeDocument": path}, **links}.items():
        folder, _, name = (path if source == "main" else source).rpartition("/")
        relations = "".join(
            f'<Relationship Id="{kind}" Type="{_OFFICE}/relationships/{kind.rstrip("0123456789")}" '
            f'Target="{"" if not source else "/"}{target}"/>'
            for kind, target in targets.items()
        )
        uri = "http://schemas.openxmlformats.org/package/2006/relationships"
        files[f"{folder}/_rels/{name}.rels".lstrip("/")] = (
            f'<Relationships xmlns="{uri}">{relations}</Relationships>'
        )
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # stored, with one date: the same bytes wherever it is made
        for member, text in files.items():
            archive.writestr(zipfile.ZipInfo(member), _XML + text)
    return out.getvalue()


def strict(data: bytes) -> bytes:
    """The file with the namespaces of ISO 29500 Strict."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
        for entry in old.infolist():
            pattern = rb"http://schemas.openxmlformats.org/(?!package)(\w+)/2006/"
            new.writestr(entry, re.sub(pattern, rb"http://purl.oclc.org/ooxml/\1/", old.read(entry)))
    return out.getvalue()


def chart() -> str:
    def points(kind: str, cache: str, values: tuple[str, ...], code: str = "") -> str:
        found = "".join(f'<c:pt idx="{n}"><c:v>{value}</c:v></c:pt>' for n, value in enumerate(values))
        form = f"<c:formatCode>{code}</c:formatCode>" if code else ""
        return (
            f"<c:{kind}><c:{cache[:3]}Ref><c:{cache}>{form}{found}</c:{cache}></c:{cache[:3]}Ref></c:{kind}>"
        )

    title = "<c:title><c:tx><c:rich><a:p><a:r><a:t>{}</a:t></a:r></a:p></c:rich></c:tx></c:title>"
    series = "".join(
        f"<c:ser>{points('tx', 'strCache', (name,))}{points('cat', 'strCache', ('Oban', 'Wick'))}"
        f"{points('val', 'numCache', values, '0.0%')}</c:ser>"
        for name, values in (("Herring", ("0.777", "0.5")), ("Cod", ("0.1", "0.25")))
    )
    axis = f"<c:valAx>{title.format('share')}</c:valAx>"
    inside = f"<c:chart>{title.format('Catch')}<c:plotArea>{series}{axis}</c:plotArea></c:chart>"
    return f"<c:chartSpace {NAMESPACES}>{inside}</c:chartSpace>"


CHART_TEXT = (
    "Chart: Catch\nAxes: share\n\n|  | Herring | Cod |\n|---|---|---|\n"
    "| Oban | 77.7% | 10.0% |\n| Wick | 50.0% | 25.0% |"
)
