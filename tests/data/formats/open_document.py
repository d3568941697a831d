"""OpenDocument files with hidden text, merged cells, numbers of lists, notes and hidden parts."""

from __future__ import annotations

import io
import zipfile

from tests.data.formats.office_parts import Sample

_NAMESPACES = " ".join(
    f'xmlns:{name}="urn:oasis:names:tc:opendocument:xmlns:{uri}:1.0"'
    for name, uri in {
        "office": "office",
        "text": "text",
        "table": "table",
        "style": "style",
        "draw": "drawing",
        "svg": "svg-compatible",
        "presentation": "presentation",
    }.items()
)


def _style(family: str, name: str, properties: str) -> str:
    return f'<style:style style:family="{family}" style:name="{name}"><style:{properties}/></style:style>'


_LEVEL = "<text:list-level-style-number style:num-format='1' text:level="
_STYLES = (
    _style("text", "gone", 'text-properties text:display="none"')
    + _style("text", "up", 'text-properties style:text-position="super 58%"')
    + _style("text", "down", 'text-properties style:text-position="-33% 58%"')
    + _style("text", "out", 'text-properties style:text-line-through-style="solid"')
    + _style("table", "off", 'table-properties table:display="false"')
    + _style("drawing-page", "unseen", 'drawing-page-properties presentation:visibility="hidden"')
    + f'<text:list-style style:name="clauses">{_LEVEL}"1" text:start-value="4" style:num-suffix="."/>'
    + f'{_LEVEL}"2" text:display-levels="2"/></text:list-style>'
)


def _file(kind: str, body: str) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:  # stored, with one date: the same bytes wherever it is made
        archive.writestr(zipfile.ZipInfo("mimetype"), f"application/vnd.oasis.opendocument.{kind}")
        dc = 'xmlns:dc="http://purl.org/dc/elements/1.1/"'
        archive.writestr(
            zipfile.ZipInfo("content.xml"),
            f'<?xml version="1.0" encoding="UTF-8"?><office:document-content {_NAMESPACES} {dc}>'
            f"<office:automatic-styles>{_STYLES}</office:automatic-styles><office:body><office:{kind}>{body}"
            f"</office:{kind}></office:body></office:document-content>",
        )
    return out.getvalue()


def _p(text: str) -> str:
    return f"<text:p>{text}</text:p>"


def _span(style: str, text: str) -> str:
    return f'<text:span text:style-name="{style}">{text}</text:span>'


def _box(text: str) -> str:
    return f"<draw:text-box>{_p(text)}</draw:text-box>"


def _cell(text: str, more: str = "") -> str:
    return f"<table:table-cell {more}>{_p(text)}</table:table-cell>"


_COVERED = "<table:covered-table-cell/>"
_TABLE = (
    "<table:table><table:table-header-rows><table:table-row>"
    + _cell("Ship", 'table:number-rows-spanned="2"')
    + _cell("Tonnage", 'table:number-columns-spanned="2"')
    + f"{_COVERED}</table:table-row></table:table-header-rows><table:table-row>{_COVERED}"
    + f"{_cell('gross')}{_cell('net')}</table:table-row><table:table-row>{_cell('Argo')}"
    + f"{_cell('<text:span>900</text:span>')}{_cell('400')}</table:table-row></table:table>"
)


def words() -> Sample:
    deleted = (
        "<text:tracked-changes><text:changed-region><text:deletion>"
        f"{_p('licorice')}</text:deletion></text:changed-region></text:tracked-changes>"
    )
    note = (
        '<text:note text:note-class="footnote"><text:note-citation>1</text:note-citation>'
        f"<text:note-body>{_p('Since 1987.')}</text:note-body></text:note>"
    )
    comment = f"<office:annotation><dc:creator>MB</dc:creator>{_p('only thirty')}</office:annotation>"
    inner = f"<text:list><text:list-item>{_p('A berth is let.')}</text:list-item></text:list>"
    body = (
        f'{deleted}<text:h text:outline-level="1">Berths</text:h>'
        + _p(f"Dose 10{_span('up', '6')}, H{_span('down', '2')}O")
        + _p(f"The level is kept{note}.")
        + _p(f'<text:span text:style-name="out">90</text:span> 70<text:s text:c="2"/>tons{comment}')
        + _p('Seen <text:span text:style-name="gone">marzipan</text:span> text')
        + f'<text:list text:style-name="clauses"><text:list-item>{_p("Berths")}{inner}</text:list-item>'
        + f"<text:list-item>{_p('Fees')}</text:list-item></text:list>"
        + _TABLE
        + f"<draw:frame><svg:desc>A crane</svg:desc>{_box('In a frame.')}</draw:frame>"
        + _p("<text:ruby><text:ruby-base>漢</text:ruby-base><text:ruby-text>kan</text:ruby-text></text:ruby>")
    )
    text = [
        "# Berths",
        "Dose 10^6, H_2O",
        "The level is kept[1].",
        "[1] Since 1987.",
        "~~90~~ 70  tons",
        "[Comment by MB: only thirty]",
        "Seen  text",
        "4. Berths\n  4.1 A berth is let.\n5. Fees",
        "| Ship | Tonnage |  |\n|---|---|---|\n|  | gross | net |\n| Argo | 900 | 400 |",
        "[Image: A crane]",
        "In a frame.",
        "漢(kan)",
    ]
    return Sample(_file("text", body), "\n\n".join(text), "left out: 1 hidden passages", "licorice marzipan")


def cells() -> Sample:
    north = [_cell("north"), _cell("7.50 €", "office:value='7.5'"), _cell("x9")]
    rows = (
        f"<table:table-row>{_cell('gate')}{_cell('fee')}{_cell('marzipan')}</table:table-row>"
        f"<table:table-row>{''.join(north)}</table:table-row>"
        f"<table:table-row table:visibility='collapse'>{_cell('0000')}</table:table-row>"
        "<table:table-row table:number-rows-repeated='1048570'><table:table-cell "
        "table:number-columns-repeated='16384'/></table:table-row>"
    )
    column = "<table:table-column table:"
    columns = f"{column}number-columns-repeated='2'/>{column}visibility='collapse'/>"
    secret = f"<table:table-row>{_cell('marzipan')}</table:table-row>"
    body = (
        f"<table:table table:name='Fees'>{columns}{rows}</table:table>"
        f"<table:table table:name='Secret' table:style-name='off'>{secret}</table:table>"
    )
    return Sample(
        _file("spreadsheet", body),
        "# Fees\n\n| gate | fee |\n|---|---|\n| north | 7.50 € |",
        "left out: 2 cells of hidden columns, 1 hidden rows, 1 hidden sheets",
        "marzipan 0000",
    )


def slides() -> Sample:
    def box(text: str, more: str = "") -> str:
        return f"<draw:frame {more}>{_box(text)}</draw:frame>"

    notes = f"<presentation:notes>{box('Speak slowly.')}</presentation:notes>"
    title = 'presentation:class="title"'
    body = (
        f"<draw:page>{box('Catches', title)}{box('Nets and ropes')}{notes}</draw:page>"
        f'<draw:page draw:style-name="unseen">{box("marzipan")}</draw:page>'
        f"<draw:page>{box('The end.')}</draw:page>"
    )
    return Sample(
        _file("presentation", body),
        "# Catches\n\nNets and ropes\n\nNotes: Speak slowly.\n\nThe end.",
        "left out: 1 hidden slides",
        "marzipan",
    )
