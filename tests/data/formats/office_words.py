"""Word documents with what parsers have lost."""

from __future__ import annotations

from tests.data.formats.office_parts import CHART_TEXT, NAMESPACES, Sample, chart, package


def word(body: str, kind: str = "docx", links: dict[str, str] | None = None, **parts: str) -> bytes:
    """A Word document with this body; other parts by their kinds of relation."""
    targets = {name: f"word/{name}.xml" for name in parts} | (links or {})
    files = {f"word/{name}.xml": text for name, text in parts.items()}
    main = f"<w:document {NAMESPACES}><w:body>{body}</w:body></w:document>"
    return package(kind, main, files, {"main": targets})


def run(text: str, look: str = "") -> str:
    return f'<w:r><w:rPr>{look}</w:rPr><w:t xml:space="preserve">{text}</w:t></w:r>'


def paragraph(*runs: str, look: str = "") -> str:
    return f"<w:p><w:pPr>{look}</w:pPr>{''.join(runs)}</w:p>"


def cell(text: str, look: str = "") -> str:
    return f"<w:tc><w:tcPr>{look}</w:tcPr>{paragraph(run(text)) if '<' not in text else text}</w:tc>"


def row(*cells: str, look: str = "") -> str:
    return f"<w:tr><w:trPr>{look}</w:trPr>{''.join(cells)}</w:tr>"


def table(*rows: str) -> str:
    return f"<w:tbl>{''.join(rows)}</w:tbl>"


SUP, SUB = '<w:vertAlign w:val="superscript"/>', '<w:vertAlign w:val="subscript"/>'


def small_words() -> Sample:
    field = '<w:r><w:fldChar w:fldCharType="{}">{}</w:fldChar></w:r>'
    checked = '<w:ffData><w:checkBox><w:default w:val="0"/><w:checked/></w:checkBox></w:ffData>'
    choice = (
        '<w:ffData><w:ddList><w:result w:val="1"/><w:listEntry w:val="Oban"/><w:listEntry w:val="Wick"/>'
        "</w:ddList></w:ffData>"
    )
    ruby = f"<w:r><w:ruby><w:rt>{run('かな')}</w:rt><w:rubyBase>{run('仮名')}</w:rubyBase></w:ruby></w:r>"
    box = (
        "<w:r><mc:AlternateContent><mc:Choice><w:txbxContent><w:p><w:r><w:t>A box.</w:t></w:r></w:p>"
        "</w:txbxContent></mc:Choice><mc:Fallback><w:t>A box.</w:t></mc:Fallback></mc:AlternateContent></w:r>"
    )
    body = [
        paragraph(
            run("Dose 10"), run("6", SUP), run(" units, H"), run("2", SUB), run("O, x"), run("n+1", SUP)
        ),
        paragraph(run("Price "), run("90", "<w:strike/>"), run(" 70 EUR, 1"), run("st", SUP)),
        paragraph(
            run("Load "), '<w:r><w:sym w:font="Symbol" w:char="F0B3"/></w:r>', run(" 5 "), run("m", FONT)
        ),
        paragraph(field.format("begin", checked), field.format("end", ""), run(" insured, ")),
        paragraph(run("Port: "), field.format("begin", choice), field.format("end", "")),
        paragraph(run("a"), "<w:r><w:noBreakHyphen/></w:r>", run("b "), ruby, box),
        paragraph(f"<w:ins>{run('added')}</w:ins>", "<w:del><w:r><w:delText>gone</w:delText></w:r></w:del>"),
    ]
    text = (
        "Dose 10^6 units, H_2O, x^(n+1)\n\nPrice ~~90~~ 70 EUR, 1st\n\nLoad ≥ 5 μ\n\n☒ insured,\n\n"
        "Port: Wick\n\na-b 仮名(かな)\n\nA box.\n\nadded"
    )
    return Sample(word("".join(body)), text, absent="gone")


FONT = '<w:rFonts w:ascii="Symbol"/>'


def notes() -> Sample:
    def part(kind: str, text: str, number: str = "2", more: str = "") -> str:
        return (
            f'<w:{kind}s {NAMESPACES}><w:{kind} w:id="{number}"{more}>{paragraph(run(text))}</w:{kind}>'
            f"</w:{kind}s>"
        )

    fraction = "<m:f><m:num><m:r><m:t>a+b</m:t></m:r></m:num><m:den><m:r><m:t>2</m:t></m:r></m:den></m:f>"
    square = "<m:sSup><m:e><m:r><m:t>w</m:t></m:r></m:e><m:sup><m:r><m:t>2</m:t></m:r></m:sup></m:sSup>"
    page = f'<w:fldSimple w:instr=" PAGE ">{run("7")}</w:fldSimple>'
    margin = "<w:{0} {1}>{2}</w:{0}>"
    body = [
        paragraph(run("The level is kept"), '<w:r><w:footnoteReference w:id="2"/></w:r>', run(".")),
        paragraph(run("So says the log"), '<w:r><w:endnoteReference w:id="2"/></w:r>', run(".")),
        paragraph(
            run("It is "), f"<m:oMath>{fraction}<m:r><m:t>·</m:t></m:r>{square}</m:oMath>", run(" tons.")
        ),
        paragraph(run("It lifts forty."), '<w:r><w:commentReference w:id="2"/></w:r>'),
        '<w:sectPr><w:headerReference w:type="default" r:id="header"/>'
        '<w:footerReference w:type="default" r:id="footer"/></w:sectPr>',
    ]
    data = word(
        "".join(body),
        footnotes=part("footnote", "Since 1987."),
        endnotes=part("endnote", "Volume 3."),
        comments=part("comment", "only thirty", more=' w:author="MB"'),
        header=margin.format("hdr", NAMESPACES, paragraph(run("File HX-77"))),
        footer=margin.format("ftr", NAMESPACES, paragraph(run("Page "), page, run(" of "), page)),
    )
    text = (
        "Header: File HX-77\n\nThe level is kept[1].\n\n[1] Since 1987.\n\nSo says the log[i].\n\n[i] Volume"
        " 3.\n\nIt is (a+b)/2·w^2 tons.\n\nIt lifts forty.\n\n[Comment by MB: only thirty]"
    )
    return Sample(data, text, absent="Footer")


def spans() -> Sample:
    two, down, on = '<w:gridSpan w:val="2"/>', '<w:vMerge w:val="restart"/>', "<w:vMerge/>"
    inner = table(row(cell("x"), cell("y")), row(cell("1"), cell("2"))) + paragraph()
    body = [
        table(
            row(cell("Ship", down), cell("Tonnage", two), cell("Crew", down)),
            row(cell("", on), cell("gross"), cell("net"), cell("", on)),
            row(cell("Argo"), cell("900"), cell("400"), cell("12")),
            row(cell("Vega", down), cell("laid up", two), cell("3")),
            row(cell("", on), cell("700"), cell("300"), cell("9")),
        ),
        paragraph(),
        table(
            row(cell("A"), cell("B"), cell("C")),
            row(cell("b1"), cell("c1"), look='<w:gridBefore w:val="1"/>'),
            row(cell("ab", '<w:hMerge w:val="restart"/>'), cell("", "<w:hMerge/>"), cell("c")),
            row(cell("a2"), look='<w:gridAfter w:val="2"/>'),
            row(cell("a3"), f"<w:sdt><w:sdtContent>{cell('b3')}</w:sdtContent></w:sdt>", cell(inner)),
        ),
        table(row(cell("A frame around text."))),
    ]
    text = (
        "| Ship | Tonnage |  | Crew |\n|---|---|---|---|\n|  | gross | net |  |\n| Argo | 900 | 400 | 12 |\n"
        "| Vega | laid up |  | 3 |\n|  | 700 | 300 | 9 |\n\n"
        "| A | B | C |\n|---|---|---|\n|  | b1 | c1 |\n| ab |  | c |\n"
        "| a2 |  |  |\n| a3 | b3 | x, y; 1, 2 |\n\n"
        "A frame around text."
    )
    return Sample(word("".join(body)), text)


def hidden_words() -> Sample:
    style = (
        f'<w:styles {NAMESPACES}><w:style w:type="character" w:styleId="Secret"><w:rPr><w:vanish/></w:rPr>'
        "</w:style></w:styles>"
    )
    white = '<w:color w:val="FFFFFF"/>'
    body = [
        paragraph(run("The gate opens at seven."), run(" The code is 0000.", "<w:vanish/>")),
        paragraph(run("Code 1111.", '<w:rStyle w:val="Secret"/>')),
        paragraph(run("Code 2222.", white), run("Code 3333.", '<w:sz w:val="1"/>')),
        paragraph(run("White on black.", f'{white}<w:shd w:val="clear" w:fill="000000"/>')),
        paragraph(run("Not hidden.", '<w:vanish w:val="0"/>')),
        table(
            row(cell("gate"), cell("opens")),
            row(cell("north"), cell("seven")),
            row(cell("south"), cell("4444"), look="<w:hidden/>"),
        ),
    ]
    text = (
        "The gate opens at seven.\n\nWhite on black.\n\nNot hidden.\n\n"
        "| gate | opens |\n|---|---|\n| north | seven |"
    )
    note = "left out: 4 hidden pieces of text, 1 hidden rows"
    return Sample(word("".join(body), styles=style), text, note, absent="0000 1111 2222 3333 4444")


def lists() -> Sample:
    def level(at: int, form: str, text: str, start: int = 1, style: str = "") -> str:
        linked = f'<w:pStyle w:val="{style}"/>' if style else ""
        return (
            f'<w:lvl w:ilvl="{at}"><w:start w:val="{start}"/><w:numFmt w:val="{form}"/>{linked}'
            f'<w:lvlText w:val="{text}"/></w:lvl>'
        )

    def item(text: str, use: int, at: int = 0) -> str:
        return paragraph(run(text), look=f'<w:numPr><w:ilvl w:val="{at}"/><w:numId w:val="{use}"/></w:numPr>')

    levels = [
        level(0, "decimal", "%1.", 4, "Heading1") + level(1, "decimal", "%1.%2", style="Clause"),
        level(0, "lowerLetter", "(%1)") + level(1, "upperRoman", "%2)"),
        level(0, "bullet", "\uf0b7"),
    ]
    lists = "".join(
        f'<w:abstractNum w:abstractNumId="{n}">{each}</w:abstractNum>' for n, each in enumerate(levels)
    )
    again = '<w:lvlOverride w:ilvl="0"><w:startOverride w:val="1"/></w:lvlOverride>'
    uses = "".join(
        f'<w:num w:numId="{n + 1}"><w:abstractNumId w:val="{which}"/>{more}</w:num>'
        for n, (which, more) in enumerate([(0, ""), (1, ""), (2, ""), (1, again)])
    )
    numbering = f"<w:numbering {NAMESPACES}>{lists}{uses}</w:numbering>"
    styles = "".join(
        f'<w:style w:type="paragraph" w:styleId="{name}"><w:name w:val="{shown}"/><w:pPr><w:numPr>'
        f'<w:numId w:val="1"/></w:numPr></w:pPr></w:style>'
        for name, shown in (("Heading1", "heading 1"), ("Clause", "Clause"))
    )
    body = [
        paragraph(run("Berths"), look='<w:pStyle w:val="Heading1"/>'),
        paragraph(run("A berth is let."), look='<w:pStyle w:val="Clause"/>'),
        paragraph(run("It is paid."), look='<w:pStyle w:val="Clause"/>'),
        item("crane", 2),
        item("first", 2, 1),
        item("second", 2, 1),
        item("quay", 2),
        item("third", 2, 1),
        item("rope", 3),
        item("again", 4),
        item("plain", 0),
        paragraph(run("Fees"), look='<w:pStyle w:val="Heading1"/>'),
    ]
    text = (
        "# 4. Berths\n\n4.1 A berth is let.\n\n4.2 It is paid.\n\n(a) crane\n\nI) first\n\nII) second\n\n"
        "(b) quay\n\nI) third\n\n- rope\n\n(a) again\n\nplain\n\n# 5. Fees"
    )
    data = word("".join(body), numbering=numbering, styles=f"<w:styles {NAMESPACES}>{styles}</w:styles>")
    return Sample(data, text)


def chart_words() -> Sample:
    body = paragraph(run("See below."), '<w:r><w:drawing><c:chart r:id="chart"/></w:drawing></w:r>')
    return Sample(word(body, chart=chart()), f"See below.\n\n{CHART_TEXT}")


def plain(kind: str) -> Sample:
    return Sample(word(paragraph(run("The ferry leaves at nine.")), kind), "The ferry leaves at nine.")
