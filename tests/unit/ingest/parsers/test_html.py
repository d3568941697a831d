"""HTML: what its marks mean, its tables as grids, and what no reader sees. Short pages and long ones, which
trafilatura reads, come out alike."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragserve.ingest.markdown_tables import markdown_table
from ragserve.ingest.parsers import Parsed, Raw, parse
from tests.unit.ingest.ingest_samples import make_epub

_LONG = "<p>" + "The rules hold until further notice for all of the wards of the north. " * 8 + "</p>"


def _page(body: str, name: str = "p.html", **taken: bool) -> Parsed:
    source = body if "<html" in body else f"<html><body><article>{body}</article></body></html>"
    return parse(Raw(source.encode(), name, ".html", **taken))


def _tidy(text: str) -> list[str]:
    return [" ".join(line.replace("|  |", "| |").replace("|  |", "| |").split()) for line in text.split("\n")]


both = pytest.mark.parametrize("rest", ["", _LONG], ids=["short", "long"])


@both
@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("The dose is 10<sup>6</sup> units.", "The dose is 10^6 units."),
        ("It is 5 m<sup>2</sup> and 3 km<sup>2</sup>.", "It is 5 m^2 and 3 km^2."),
        ("x<sub>1</sub> is 2<sup>-3</sup>, a<sub>i+1</sub>", "x_1 is 2^-3, a_(i+1)"),
        ("as in note<sup>3</sup> here", "as in note[3] here"),
        ('as m<sup><a href="#fn1">1</a></sup> says', "as m[1] says"),
        ("as Wikipedia says.<sup>[4]</sup> So", "as Wikipedia says.[4] So"),
        ("Oban.<sup>7</sup> So", "Oban.[7] So"),
        ("the 1<sup>st</sup> of May", "the 1st of May"),
        ("Add 5<sup>1</sup>/<sub>2</sub> cups", "Add 5 1/2 cups"),
        ("(a+b)<sup>n</sup>", "(a+b)^n"),
        ("Price <del>90</del> <ins>70</ins> EUR, <s>old</s>", "Price ~~90~~ 70 EUR, ~~old~~"),
        ("<ruby>漢字<rp>(</rp><rt>kanji</rt><rp>)</rp></ruby> is", "漢字(kanji) is"),
        ('Price <span style="text-decoration:line-through">90</span> 70 EUR', "Price ~~90~~ 70 EUR"),
        ('is 10<span style="vertical-align: super">6</span> units', "is 10^6 units"),
        ("He said <q>no</q> and left on <time>5 March</time>.", "He said “no” and left on 5 March."),
        ('Name: <input value="Isla"> <input type=checkbox checked> insured', "Name: Isla ☒ insured"),
        ("<math><munderover><mo>∑</mo><mi>i</mi><mi>n</mi></munderover><mi>x</mi></math> is", "∑_i^n x is"),
        ("is <math><mn>2</mn><mfrac><mn>1</mn><mn>2</mn></mfrac></math> m", "is 2 1/2 m"),
        ("<math><mfenced><mi>a</mi><mi>b</mi></mfenced></math> and", "(a, b) and"),
        ("<math><mtable><mtr><mtd>1</mtd><mtd>2</mtd></mtr></mtable></math> is", "[1, 2] is"),
        ("so <math><msup><mi>x</mi><mn>2</mn></msup><mo>=</mo><mfrac><mn>1</mn><mi>y</mi></mfrac></math>.",
         "so x^2 = 1/y."),
    ],
)  # fmt: skip
def test_marks_are_written(source: str, text: str, rest: str) -> None:
    assert text in _page(f"<p>{source}</p>{rest}").text


@both
def test_lists_have_their_numbers(rest: str) -> None:
    text = _page(
        "<ol start=4><li>Alpha clause stands.</li><li value=7><p>Beta clause stands.</p></li></ol>"
        f"<ol type=a><li>Gamma clause stands.</li></ol><ul><li>Delta stands here.</li></ul>{rest}"
        "<ol style='list-style-type:lower-roman'><li>Zeta clause stands.</li></ol>"
        "<ol style='list-style:none'><li>Eta clause stands.</li></ol>"
    ).text
    assert "i. Zeta clause stands." in text
    assert "1. Eta" not in text
    for line in ("4. Alpha clause stands.", "7. Beta clause stands.", "a. Gamma clause stands."):
        assert line in text.split("\n")


@both
def test_images_have_their_descriptions_and_captions(rest: str) -> None:
    text = _page(
        '<p>The pier <img src="a.png" alt="a map of the pier"> is long, and so are all of the others.</p>'
        f'<figure><img src="b.png" alt="logo"><figcaption>The pier in 1987.</figcaption></figure>{rest}'
    ).text
    assert "The pier [Image: a map of the pier] is long" in text
    assert "The pier in 1987." in text.split("\n")
    assert "logo" not in text


@both
def test_inline_elements_end_no_lines(rest: str) -> None:
    text = _page(f"<p>Take <i>a</i><sub>ij</sub> and <b>two</b>, <span>not</span> three.</p>{rest}").text
    assert "Take a_ij and two, not three." in text


@both
def test_a_caption_stands_before_its_table(rest: str) -> None:
    text = _page(f"{rest}<table><caption>Fares of 1987</caption><tr><td>only<td>one row</table>{rest}").text
    assert "Fares of 1987" in text.split("\n")


def test_a_file_of_few_elements_is_html() -> None:
    source = b"<dl><dt>Berth<dd>A place for a ship</dl>"
    assert parse(Raw(source, "a.html", ".html")).text == "Berth\nA place for a ship"


def test_options_are_apart() -> None:
    assert _page("<select><option>Oban<option>Wick</select>").text == "Oban\nWick"


@both
@pytest.mark.parametrize(
    ("table", "rows"),
    [
        (
            "<tr><th>Ship<th>Port<th>Day<tr><td rowspan=2>Argo<td>Bergen<td>Mon<tr><td>Oslo<td>Tue"
            "<tr><td>Vega<td colspan=2>laid up",
            ["| Ship | Port | Day |", "|---|---|---|", "| Argo | Bergen | Mon |", "| | Oslo | Tue |",
             "| Vega | laid up | |"],
        ),
        (
            "<thead><tr><th rowspan=2>Boat<th colspan=2>Fare<tr><th>day<th>week</thead>"
            "<tbody><tr><td>Argo<td>5<td>20</tbody>",
            ["| Boat | Fare | |", "|---|---|---|", "| | day | week |", "| Argo | 5 | 20 |"],
        ),
        (
            "<tfoot><tr><td>all<td>3</tfoot><tr><td>a<td rowspan=0>1<tr><td>b",
            ["| a | 1 |", "|---|---|", "| b | |", "| all | 3 |"],
        ),
        (
            "<tr><th>Ship<th>Berths<tr><td>Argo<td><table><tr><td>A1<td>4 m<tr><td>B1<td>5 m</table>",
            ["| Ship | Berths |", "|---|---|", "| Argo | A1, 4 m; B1, 5 m |"],
        ),
        (
            "<tr><td>Left words<table><tr><th>Berth<th>Depth<tr><td>A1<td>4.5 m</table><td>The right words",
            ["Left words", "| Berth | Depth |", "|---|---|", "| A1 | 4.5 m |", "The right words"],
        ),
    ],
)  # fmt: skip
def test_tables_are_grids(table: str, rows: list[str], rest: str) -> None:
    found = _tidy(_page(f"<h1>Sailings</h1>{rest}<table>{table}</table>{rest}").text)
    assert "\n".join(rows) in "\n".join(found)


@both
def test_tables_by_roles_and_of_one_row_are_read(rest: str) -> None:
    roles = "<div role=table><div role=row><span role=columnheader>Port</span><span role=columnheader>Depth"
    roles += "</span></div><div role=row><span role=cell>Oban</span><span role=cell>8</span></div></div>"
    text = _page(f"{rest}{roles}<table><tr><td>alone<td>in a row</table>").text
    assert "| Port | Depth |\n|---|---|\n| Oban | 8 |" in text
    assert text.endswith("alone\nin a row")


@both
def test_text_of_drawings_is_read_and_what_replaces_others_is_not(rest: str) -> None:
    text = _page(
        f"<p>Catch:</p><svg><title>icon</title><text>Herring 777 t</text></svg>{rest}"
        "<noscript>wombat</noscript><template>wombat</template><dialog>wombat</dialog>"
        "<canvas>wombat</canvas><p>The end.</p>"
    ).text
    assert "Herring 777 t" in text
    assert "wombat" not in text
    assert "icon" not in text


def test_style_sheets_hide_where_nothing_can_show_it_later() -> None:
    page = "<html><head><style>.x {display: none} #y {visibility: hidden}</style>{}</head><body><p>Open.</p>"
    page += "<p class=x>wombat</p><p id=y>wombat</p></html>"
    found = _page(page.replace("{}", ""))
    assert (found.text, found.note) == ("Open.", "left out: 2 hidden passages")
    assert "wombat" in _page(page.replace("{}", "<script>show()</script>")).text
    assert "wombat" in _page(page.replace("{}", "<style>a:hover + .x {display: block}</style>")).text


@both
def test_tables_that_follow_each_other_are_two(rest: str) -> None:
    tables = "<table><tr><th>Port<th>Depth<tr><td>Oban<td>8.5 m<tr><td>Wick<td>6.2 m</table>"
    tables += "<table><tr><th>Ship<th>Crew<tr><td>Argo<td>twelve</table>"
    found = "\n".join(_tidy(_page(f"{rest}{tables}").text))
    assert "| Wick | 6.2 m |\n\n| Ship | Crew |\n|---|---|\n| Argo | twelve |" in found


def test_lists_count_beyond_z() -> None:
    text = _page("<ol type=a start=26><li>last<li>first<li>second</ol><ol type=I start=49><li>x</ol>").text
    assert text == "z. last\naa. first\nab. second\nXLIX. x"


def test_tables_of_mail_and_books_are_grids() -> None:
    table = "<table><tr><th>Ship</th><th>Port</th></tr><tr><td rowspan='2'>Argo</td><td>Oban</td></tr>" \
        "<tr><td>Oslo</td></tr></table>"  # fmt: skip
    mail = b"From: a@example.org\nContent-Type: text/html\n\n" + table.encode()
    for data, ext in ((mail, ".eml"), (make_epub({"a.xhtml": table}), ".epub")):
        assert "| Argo | Oban |\n| | Oslo |" in "\n".join(_tidy(parse(Raw(data, f"a{ext}", ext)).text))


_CELL = st.text("abc 1", min_size=1, max_size=5).filter(str.strip)


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.lists(_CELL, min_size=n, max_size=n), min_size=2)))
def test_any_table_comes_back(rows: list[list[str]]) -> None:
    source = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows)
    assert _page(f"<table>{source}</table>").text == markdown_table(rows)


HIDDEN = (
    "<p hidden>wombat</p>",
    '<p style="DISPLAY:NONE">wombat</p>',
    '<div style="visibility: hidden">wombat <b>wombat</b></div>',
    '<p style="font-size:0">wombat</p>',
    '<span style="opacity:0 !important;">wombat</span>',
    '<div style="max-height:0;overflow:hidden"><p>wombat</p></div>',
    '<div style="position:absolute;left:-9999px">wombat</div>',
    '<p style="color:#FFFFFF">wombat</p>',
    '<p><font color="white">wombat</font></p>',
    '<p style="mso-hide:all">wombat</p>',
    '<p style="opacity:0.01">wombat</p>',
    '<p style="transform: scale(0)">wombat</p>',
    '<p style="margin-left:-9999px">wombat</p>',
    '<p style="position:fixed;left:-100vw">wombat</p>',
    '<p style="color:hsl(0, 0%, 100%)">wombat</p>',
    '<p style="font:0/0 a">wombat</p>',
    "<dialog>wombat</dialog>",
)


@both
@pytest.mark.parametrize("source", HIDDEN)
def test_what_no_reader_sees_is_left_out_and_counted(source: str, rest: str) -> None:
    body = f"<p>The gate opens at seven.</p>{source} <p>It closes at nine.</p>{rest}"
    found = _page(body)
    assert "wombat" not in found.text
    assert "The gate opens at seven.\nIt closes at nine." in found.text
    assert found.note == "left out: 1 hidden passages"
    assert "wombat" in _page(body, hidden=True).text


@pytest.mark.parametrize(
    "source",
    [
        '<div style="font-size:0"><p style="font-size:14px">wombat</p></div>',
        '<div style="visibility:hidden"><p style="visibility:visible">wombat</p></div>',
        '<div style="background:#003366"><p style="color:white">wombat</p></div>',
        '<table bgcolor="navy"><tr><td style="color:#fff">wombat</td></tr></table>',
        '<html><head><style>.top {color: navy}</style></head><body><p style="color:white">wombat</p></html>',
        '<p style="opacity:0.5;font-size:0.9em">wombat</p>',
        '<p aria-hidden="true">wombat</p>',
    ],
)
def test_what_a_reader_sees_stays(source: str) -> None:
    assert "wombat" in _page(source).text


def test_a_page_nested_without_end_is_read() -> None:
    deep = "<math>" + "<mrow>" * 5000 + "<mi>x</mi>" + "</mrow>" * 5000 + "</math>"
    assert "Seven" in _page(f"<p>Seven</p>{deep}{'<sup>' * 2000}1").text
