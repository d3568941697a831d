"""Rich Text Format, and a Word file of 1997 that LibreOffice wrote."""

from __future__ import annotations

from pathlib import Path

from tests.data.formats.office_parts import Sample

_RTF = r"""{\rtf1\ansi\ansicpg1251\deff0{\fonttbl{\f0\fcharset204 Arial;}{\f1\fcharset128 MS Gothic;}}
{\stylesheet{\s1\b\outlinelevel0 heading 1;}}
{\info{\title Berths \u8211? \'cf\'f0\'e8\'f7\'e0\'eb}{\author Ann}}
{\header\pard File HX-77\par}{\footer\pard Page {\field{\*\fldinst PAGE}{\fldrslt 1}}\par}
\pard\s1 Berths\par
\pard\plain\f0 \'cf\'f0\'e8\'e2\'e5\'f2 \u8364? and {\f1\'93\'fa\'96\'7b}, \uc2\u26085\'93\'fa\uc1  end\par
The level is kept{\super\chftn{\*\footnote\pard Since 1987.}}.{\*\annotation\pard only thirty}\par
Dose 10{\super 6}, H{\sub 2}O, {\strike 90} 70\par
Seen {\v marzipan} and {\deleted licorice}text\par
{\listtext 4.\tab}Berths are let.\par
{\listtext 5.\tab}Fees are paid.\par
\pard{\pict\pngblip\bin5 {}}\\}\par
\trowd\clmgf\cellx1\clmrg\cellx2\cellx3\pard\intbl Ship\cell\cell Crew\par men\cell\row
\trowd\cellx1\cellx2\cellx3\pard\intbl Argo\cell 900\cell 12\cell\row
\pard After {\field{\*\fldinst HYPERLINK "http://example.com"}{\fldrslt a link}}.\par
}"""


def rich_text() -> Sample:
    text = [
        "Header: File HX-77",
        "# Berths",
        "Привет € and 日本, 日 end",
        "The level is kept[1].",
        "[1] Since 1987.",
        "[Comment: only thirty]",
        "Dose 10^6, H_2O, ~~90~~ 70",
        "Seen  and text",
        "4. Berths are let.\n5. Fees are paid.",
        "| Ship |  | Crew men |\n|---|---|---|\n| Argo | 900 | 12 |",
        "After a link.",
    ]
    return Sample(_RTF.encode(), "\n\n".join(text), "left out: 1 hidden passages", "marzipan")


def old_word() -> Sample:
    """Made by hand: LibreOffice 7.4 saved a file of python-docx with a hidden word ``marzipan``."""
    text = [
        "Header: Survey of 2019",
        "# Harbours of the west",
        "Oban is 8.5 m deep; Grüße, Привет, 日本語 and €5. 10^6",
        "Visible  and ~~struck~~ more.",
        "| harbour | depth | ground |\n|---|---|---|\n| Oban | 8.5 | sand gravel |\n| Mallaig | 6.2 |  |",
        "- first\n- second\n- one\n- two",
    ]
    data = (Path(__file__).parent / "words.doc").read_bytes()
    return Sample(data, "\n\n".join(text), "left out: 4 numbers of list items")


def text_boxes() -> Sample:
    """Made as `old_word`: two text boxes, a third in the header."""
    data = (Path(__file__).parent / "boxes.doc").read_bytes()
    text = "Moorings are let by the year.\n\nAsk at the office.\n\nBring a rope."
    return Sample(data, text, "left out: 3 text boxes")


def samples() -> dict[str, Sample]:
    return {"old.rtf": rich_text(), "words.doc": old_word(), "boxes.doc": text_boxes()}
