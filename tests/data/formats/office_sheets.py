"""Workbooks with what parsers have lost."""

from __future__ import annotations

from tests.data.formats.office_parts import NAMESPACES, Sample, chart, package, strict


def book(sheet: str, kind: str = "xlsx", styles: str = "", state: str = "", **beside: str) -> bytes:
    """A workbook of a sheet, and of a second one if ``state`` says how it is hidden."""
    second = f'<s:sheet name="Secret" sheetId="2" state="{state}" r:id="worksheet2"/>' if state else ""
    sheets = f'<s:sheet name="Fees" sheetId="1" r:id="worksheet1"/>{second}'
    main = f"<s:workbook {NAMESPACES}><s:sheets>{sheets}</s:sheets></s:workbook>"
    wrapped = f"<s:worksheet {NAMESPACES}>{{}}</s:worksheet>"
    styles = styles or f"<s:styleSheet {NAMESPACES}/>"
    hidden = (
        "<s:sheetData><s:row><s:c t='inlineStr'><s:is><s:t>marzipan</s:t></s:is></s:c></s:row></s:sheetData>"
    )
    parts = {
        "xl/s1.xml": wrapped.format(sheet),
        "xl/s2.xml": wrapped.format(hidden),
        "xl/styles.xml": styles,
    }
    targets = {"worksheet1": "xl/s1.xml", "worksheet2": "xl/s2.xml", "styles": "xl/styles.xml"}
    links = {"main": targets, "xl/s1.xml": {name: f"xl/{name}.xml" for name in beside if name != "chart"}}
    if "drawing" in beside:
        links["xl/drawing.xml"] = {"chart": "xl/chart.xml"}
    return package(kind, main, parts | {f"xl/{name}.xml": text for name, text in beside.items()}, links)


def cells(*rows: tuple[str | tuple[str, int], ...], hidden: int = -1) -> str:
    """Rows of texts, and of numbers with their styles."""
    out = []
    for at, each in enumerate(rows):
        texts = [
            f"<s:c t='inlineStr'><s:is><s:t>{value}</s:t></s:is></s:c>"
            if isinstance(value, str)
            else f"<s:c s='{value[1]}'><s:v>{value[0]}</s:v></s:c>"
            for value in each
        ]
        look = ' hidden="1"' if at == hidden else ""
        out.append(f"<s:row{look}>{''.join(texts)}</s:row>")
    return f"<s:sheetData>{''.join(out)}</s:sheetData>"


def formats() -> Sample:
    codes = ["0.0%", "#,##0.00 [$€-407]", "00000", "[h]:mm", "&quot;B-&quot;000", "dd/mm/yyyy", ";;;"]
    named = "".join(f'<s:numFmt numFmtId="{n + 164}" formatCode="{code}"/>' for n, code in enumerate(codes))
    used = "".join(f'<s:xf numFmtId="{n + 164}"/>' for n in range(len(codes)))
    # fills and borders that make other readers refuse the whole workbook
    odd = '<s:fills><s:fill/></s:fills><s:borders><s:border><s:left style="wavy"/></s:border></s:borders>'
    inside = f"<s:numFmts>{named}</s:numFmts>{odd}<s:cellXfs>{used}</s:cellXfs>"
    styles = f"<s:styleSheet {NAMESPACES}>{inside}</s:styleSheet>"
    names = ("rate", "deposit", "postcode", "shift", "berth", "opened", "secret")
    stored = ("0.075", "1250", "4110", "1.2604166666666667", "7", "45356", "5")
    rows = [(name, (value, at)) for at, (name, value) in enumerate(zip(names, stored, strict=True))]
    comments = (
        f'<s:comments {NAMESPACES}><s:commentList><s:comment ref="B2"><s:text><s:t>in winter</s:t></s:text>'
        "</s:comment></s:commentList></s:comments>"
    )
    text = (
        "# Fees\n\n| item | value |\n|---|---|\n| rate | 7.5% |\n| deposit | 1,250.00 € |\n"
        "| postcode | 04110 |\n"
        "| shift | 30:15 |\n| berth | B-007 |\n| opened | 2024-03-05 |\n"
        "| secret |  |\n\n[Comment on B2: in winter]"
        "\n\nChart: Catch\nAxes: share"
    )
    drawing = f"<s:drawing {NAMESPACES}/>"
    beside = {"comments": comments, "drawing": drawing, "chart": chart()}
    data = book(cells(("item", "value"), *rows), "xlsm", styles, **beside)
    return Sample(data, text)


def hidden_cells() -> Sample:
    rows = cells(("gate", "opens"), ("north", "seven"), ("south", "0000"), hidden=2)
    text = "# Fees\n\n| gate | opens |\n|---|---|\n| north | seven |"
    return Sample(
        book(rows, state="veryHidden"), text, "left out: 1 hidden rows, 1 hidden sheets", "0000 marzipan"
    )


def strict_cells() -> Sample:
    return Sample(strict(book(cells(("gate", "opens"), ("north", "seven")))), hidden_cells().text)
