"""Numbers of cells, as a reader of the workbook sees them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragserve.ingest.parsers.number_formats import plain_number, shown, text_shown

EURO = '_-* #,##0.00\\ "€"_-;-* #,##0.00\\ "€"_-;_-* "-"??\\ "€"_-;_-@_-'
SHOWN = [
    ("0.075", "0.0%", "7.5%"),
    ("0.05", "0.0%;[Red]-0.0%", "5.0%"),
    ("-0.05", "0.0%;[Red]-0.0%", "-5.0%"),
    ("1250", '#,##0.00 "EUR"', "1,250.00 EUR"),
    ("1250", "#,##0.00\\ [$€-407]", "1,250.00 €"),
    ("1250", "0.00 EUR", "1250.00 EUR"),
    ("1234", "#,##0 kr", "1,234 kr"),
    ("1234.5", EURO, "1,234.50 €"),
    ("0", EURO, "- €"),
    ("-1250.5", "#,##0.00;(#,##0.00)", "(1,250.50)"),
    ("7", '"B-"000', "B-007"),
    ("4110", "00000", "04110"),
    ("123456789", "000\\-00\\-0000", "123-45-6789"),
    ("5551234", "000-0000", "555-1234"),
    ("1234567", '0.0,,"M"', "1.2M"),
    ("1234567", "#,##0,", "1,235"),
    ("1234567", "0,.0", "1234.6"),
    ("12345.678", "0.00E+00", "1.23E+04"),
    ("1e-9", "0.0E+0", "1.0E-9"),
    ("0.5", "# ?/?", "1/2"),
    ("5.25", "# ??/??", "5 1/4"),
    ("0.125", "# ?/8", "1/8"),
    ("3.5", '0.## "kg"', "3.5 kg"),
    ("-0.001", "0.00", "0.00"),
    ("2.5", "0", "3"),
    ("5", '[>=100]"big";"small"', "small"),
    ("0", "0;-0;;@", ""),
    ("7", ";;;", ""),
    ("12", 'General" m"', "12 m"),
    ("nan", "0.0", "nan"),
    ("1", "Standard", "1"),
    ("45356", "TT.MM.JJJJ", "45356"),
    ("45356", "DD.MM.YYYY", "2024-03-05"),
    ("45356.75", "d/m/yyyy h:mm:ss", "2024-03-05 18:00:00"),
    ("45356.5", "yyyy-mm-ddThh:mm", "2024-03-05 12:00"),
    ("45356", "mmm yyyy", "Mar 2024"),
    ("45356", "dddd", "Tuesday"),
    ("0.2708333333333333", "hh:mm", "06:30"),
    ("0.0208333333333333", "mm:ss", "30:00"),
    ("0.000011574", "mm:ss.0", "00:01.0"),
    ("1.260416666666667", "[h]:mm", "30:15"),
    ("1.260416666666667", "[hh]:mm:ss", "30:15:00"),
    ("1.5", "[m]:ss", "2160:00"),
    ("-0.5", "[h]:mm", "-12:00"),
    ("0.000011574", "[s].000", "1.000"),
]


@pytest.mark.parametrize(("stored", "code", "text"), SHOWN)
def test_a_number_is_shown_as_its_format_says(stored: str, code: str, text: str) -> None:
    assert shown(stored, code) == text


def test_days_are_counted_from_1900_or_1904() -> None:
    assert shown("1", "yyyy-mm-dd") == "1900-01-01"
    assert shown("61", "yyyy-mm-dd") == "1900-03-01"
    assert shown("0", "yyyy-mm-dd h:mm", from_1904=True) == "1904-01-01 00:00"


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ("0.1", "0.1"),
        ("0.30000000000000004", "0.3"),
        ("-1250.50", "-1250.5"),
        ("1E21", "1E+21"),
        ("100000000000000000", "100000000000000000"),
        ("0", "0"),
        ("word", "word"),
    ],
)
def test_a_number_without_a_format_keeps_its_digits(stored: str, text: str) -> None:
    assert plain_number(stored) == text


def test_a_format_may_hide_text() -> None:
    assert text_shown("a;b", "@") == "a;b"
    assert text_shown("a", ";;;") == ""


@given(st.text('0#?.,%E+-"\\[]hms;/ ydAM$*_@G', max_size=12), st.floats(allow_nan=False))
def test_any_format_gives_some_text(code: str, value: float) -> None:
    assert isinstance(shown(repr(value), code), str)


@given(st.decimals("-999999", "999999", places=2))
def test_two_places_are_kept(value: object) -> None:
    assert float(shown(str(value), "#,##0.00").replace(",", "")) == float(str(value))
