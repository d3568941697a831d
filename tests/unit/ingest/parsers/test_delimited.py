"""CSV files of unknown dialects: the delimiter is judged by what it makes of the rows."""

from __future__ import annotations

import csv
import io

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from ragserve.ingest.parsers import Parsed, Raw, parse
from tests.unit.ingest.parsers.table_texts import table_in, written


def read(text: str, ext: str = ".csv") -> Parsed:
    return parse(Raw(text.encode(), f"a{ext}", ext))


DIALECTS = {
    "decimal commas": (
        "Hafen;Tiefe, m;Breite, m\nOban;8,5;120,0\nWick;6,2;95,5\n",
        "Hafen|Tiefe, m|Breite, m",
    ),
    "two columns": ("Hafen;Tiefe, m\nOban;8,5\nWick;6,2\n", "Hafen|Tiefe, m"),
    "only decimals": ("a;b\n8,5;6,2\n1,0;2,0\n", "a|b"),
    "lists": ("name;labels\na;['L1', 'L2']\nb;['L1', 'L3']\n", "name|labels"),
    "quoted lists": ("id,labels\n1,\"['L1', 'L2']\"\n2,\"['L3']\"\n", "id|labels"),
    "bars": ("port|opened;closed\nOban|1880;1990\nWick|1890;1991\n", "port|opened;closed"),
    "semicolons in text": ("id,text\n1,a;b\n2,c;d\n", "id|text"),
    "commas in text": ("nom;prix\nPain, beurre;1,50\nLait;0,99\n", "nom|prix"),
    "apostrophes": ("a,b\nit's,x\n'tis,y\n", "a|b"),
    "spaces": ('a, b\n"x, y", "p, q"\nOban, Wick\n', "a|b"),
    "names": ('"Last, First",age\n"Smith, Ann",12\n', "Last, First|age"),
    "sentences": ("sentence\nIt left at nine, and came back.\nIt is deep, and long.\n", "sentence"),
    "a column of lists": ("labels\n['L1', 'L2']\n['L1', 'L3']\n", "labels"),
    "a column of names": ("name\nSmith, Ann\nJones, Bo\n", "name"),
    "a column of decimals": ("price\n1,5\n2,7\n", "price"),
    "title": ("Harbour report\nSpring 2024\n\nport,depth\nOban,8.5\n", "port|depth"),
    "title with a comma": ("Harbour report, spring\nport,depth,width\nOban,8.5,3\n", "port|depth|width"),
    "padded title": ("Report,,,\n,,,\na,b,c,d\n1,2,3,4\n", "a|b|c|d"),
    "two headers": (",2019,,2020,\nport,a,b,c,d\nOban,1,2,3,4\n", "|2019||2020|"),
    "a header without a first name": (",value\nx,1\ny,2\n", "|value"),
    "a header with one name": (",,value\na,x,1\nb,y,2\n", "||value"),
    "ragged": ("a,b,c\n1,2\n1,2,3\n1,2,3,4\n", "a|b|c|"),
    "rows longer than the header": ("a,b\nx,y,z\np,q,r\n", "a|b|"),
}


@pytest.mark.parametrize("name", list(DIALECTS))
def test_the_delimiter_is_the_one_that_makes_a_table(name: str) -> None:
    text, header = DIALECTS[name]
    found = read(text)
    assert table_in(found.text)[0] == header.split("|")
    assert "column" in found.note


def test_lines_above_a_table_are_its_title() -> None:
    assert read("Harbours\nSpring\n\nport,depth\nOban,8\n").text.startswith("Harbours\n\nSpring\n\n| port |")


@pytest.mark.parametrize(
    ("text", "remarks", "lines"),
    [
        ('id,remark\n1,5" pipe\n2,"6 inch pipe\n3,7 inch\n', ['5" pipe', '"6 inch pipe', "7 inch"], "3"),
        ('id,remark\n1,"6 inch\n2,"8 inch\n3,ok\n', ['"6 inch', '"8 inch', "ok"], "2, 3"),
        ('id,remark\n1,"6" pipe"\n2,"a, b"\n', ['6" pipe', "a, b"], ""),
        ('id,remark\n1,"six ""6"" inch"\n2,x\n', ['six "6" inch', "x"], ""),
        ('id,remark\n1,"two\nlines"\n2,x\n', ["two lines", "x"], ""),
    ],
)
def test_a_quote_costs_no_other_row(text: str, remarks: list[str], lines: str) -> None:
    found = read(text)
    assert [row[1] for row in table_in(found.text)[1:]] == remarks
    assert ("unclosed quotes taken literally in lines " + lines in found.note) == bool(lines)


def test_rows_with_more_cells_than_the_header_are_reported() -> None:
    found = read("id,name,qty\n1,rope,5\n2,buoy, large,7\n3,net,2\n")
    assert table_in(found.text)[1] == ["1", "rope", "5", ""]
    assert found.note.endswith("1 rows have more cells than the header: 2")


def test_a_column_of_quoted_cells_keeps_its_lines() -> None:
    found = read('remark\n"It left, late,\nand came back."\n"He said ""no"", and so on."\n')
    assert table_in(found.text) == [
        ["remark"],
        ["It left, late, and came back."],
        ['He said "no", and so on.'],
    ]
    assert found.note == "read as one column"


def test_a_row_of_many_columns_becomes_a_record_with_their_names() -> None:
    names = ["time", *(f"sensor_{n}" for n in range(300))]
    rows = [[f"day {day}", *(str(day * 1000 + n) for n in range(300))] for day in (1, 2)]
    text = read("\n".join(map(",".join, [names, *rows]))).text
    paragraphs = text.split("\n\n")
    assert all(each.startswith(("time: day 1; ", "time: day 2; ")) for each in paragraphs)
    assert max(map(len, paragraphs)) < 400
    assert "sensor_140: 1140;" in text
    assert "---" not in text


CELL = st.text(st.characters(codec="utf-8", exclude_categories=["C"]), min_size=1, max_size=8)


@given(
    st.lists(st.lists(CELL, min_size=3, max_size=3), min_size=2, max_size=5),
    st.sampled_from(",;\t|"),
    st.data(),
)
def test_a_table_written_with_all_quotes_comes_back_cell_for_cell(
    rows: list[list[str]], delimiter: str, data: st.DataObject
) -> None:
    assume(all(cell.strip() for row in rows for cell in row))
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    text = "sep=" + delimiter + "\n" + out.getvalue() if data.draw(st.booleans()) else out.getvalue()
    assert table_in(read(text).text) == written(rows)


@given(st.lists(st.tuples(CELL, st.floats(0, 9)), min_size=2, max_size=5), st.sampled_from(",;\t|"))
def test_a_table_of_numbers_comes_back_cell_for_cell(rows: list[tuple[str, float]], delimiter: str) -> None:
    assume(all(any(map(str.isalpha, name)) for name, _ in rows))
    table = [["port", "depth"], *([name, f"{depth:.2f}"] for name, depth in rows)]
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter).writerows(table)
    assert table_in(read(out.getvalue()).text) == written(table)
