"""Slides with what parsers have lost."""

from __future__ import annotations

from tests.data.formats.office_parts import CHART_TEXT, NAMESPACES, Sample, chart, package


def slide(shapes: str, look: str = "") -> str:
    return f"<p:sld {NAMESPACES}{look}><p:cSld><p:spTree>{shapes}</p:spTree></p:cSld></p:sld>"


def shape(body: str, holder: str = "", look: str = "") -> str:
    kind = f'<p:ph type="{holder}"/>' if holder else ""
    about = f'<p:nvSpPr><p:cNvPr id="1" name=""{look}/><p:nvPr>{kind}</p:nvPr></p:nvSpPr>'
    return f"<p:sp>{about}<p:txBody>{body}</p:txBody></p:sp>"


def line(*runs: tuple[str, str], look: str = "") -> str:
    texts = "".join(f"<a:r><a:rPr {style}/><a:t>{text}</a:t></a:r>" for text, style in runs)
    return f"<a:p><a:pPr>{look}</a:pPr>{texts}</a:p>"


def slides(kind: str) -> Sample:
    number = '<a:buAutoNum type="{}"/>'.format
    boxes = [
        ('<a:tc gridSpan="2">{}</a:tc>', "Tonnage"),
        ('<a:tc hMerge="1">{}</a:tc>', "Tonnage"),
        ('<a:tc rowSpan="2">{}</a:tc>', "Argo"),
        ("<a:tc>{}</a:tc>", "900"),
        ('<a:tc vMerge="1">{}</a:tc>', "Argo"),
        ("<a:tc>{}</a:tc>", "400"),
    ]
    texts = [box.format(f"<a:txBody>{line((text, ''))}</a:txBody>") for box, text in boxes]
    grid = "".join(f"<a:tr>{''.join(texts[at : at + 2])}</a:tr>" for at in (0, 2, 4))
    frame = "<p:graphicFrame><a:graphic><a:graphicData>{}</a:graphicData></a:graphic></p:graphicFrame>".format
    first = [
        shape(line(("Catches", "")), "title"),
        shape(
            line(
                ("Dose 10", ""), ("6", 'baseline="30000"'), (", H", ""), ("2", 'baseline="-25000"'), ("O", "")
            )
            + line(("90", 'strike="sngStrike"'), (" 70", ""))
            + line(("nets", ""), look=number("arabicPeriod"))
            + line(("ropes", ""), look=number("arabicPeriod"))
            + line(("buoys", ""), look=number("alphaLcParenR")),
            "body",
        ),
        frame(f"<a:tbl>{grid}</a:tbl>"),
        frame('<c:chart r:id="chart"/>'),
        shape(line(("unseen 0000", "")), look=' hidden="1"'),
        shape(line(("Harbour office", "")), "ftr"),
        shape(line(("1", "")), "sldNum"),
    ]
    third = shape(line(("The end.", ""))) + shape(line(("Harbour office", "")), "ftr")
    comment = "<p:text>only thirty</p:text>"
    files = {
        "ppt/s1.xml": slide("".join(first)),
        "ppt/s2.xml": slide(shape(line(("marzipan", ""))), ' show="0"'),
        "ppt/s3.xml": slide(third),
        "ppt/chart.xml": chart(),
        "ppt/notes.xml": f"<p:notes {NAMESPACES}>{shape(line(('Speak slowly.', '')), 'body')}</p:notes>",
        "ppt/cm.xml": f'<p:cmLst {NAMESPACES}><p:cm authorId="0">{comment}</p:cm></p:cmLst>',
        "ppt/who.xml": f'<p:cmAuthorLst {NAMESPACES}><p:cmAuthor id="0" name="MB"/></p:cmAuthorLst>',
    }
    links = {
        "main": {**{f"slide{n}": f"ppt/s{n}.xml" for n in (1, 2, 3)}, "commentAuthors": "ppt/who.xml"},
        "ppt/s1.xml": {"chart": "ppt/chart.xml", "notesSlide": "ppt/notes.xml", "comments": "ppt/cm.xml"},
    }
    listed = "".join(f'<p:sldId r:id="slide{n}"/>' for n in (1, 2, 3))
    main = f"<p:presentation {NAMESPACES}><p:sldIdLst>{listed}</p:sldIdLst></p:presentation>"
    text = (
        "# Catches\n\nDose 10^6, H_2O\n~~90~~ 70\n1. nets\n2. ropes\na) buoys\n\n"
        "| Tonnage |  |\n|---|---|\n| Argo | 900 |\n|  | 400 |\n\n"
        f"{CHART_TEXT}\n\nHarbour office\n\nNotes: Speak slowly.\n\n[Comment by MB: only thirty]\n\nThe end."
    )
    note = "left out: 1 hidden shapes, 1 hidden slides"
    return Sample(package(kind, main, files, links), text, note, absent="0000 marzipan")
