"""Text in the charsets that people saved it in: read right, and said to be a guess."""

from __future__ import annotations

from pathlib import Path

import pytest

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers import Parsed, Raw, parse
from ragserve.ingest.parsers.charset import decode
from tests.charsets import HOME, OTHERS, TABLES, samples, tables


@pytest.mark.parametrize("language", HOME)
def test_twenty_languages_in_their_charsets(language: str) -> None:
    read = [
        (charset, size, text, decode(data))
        for name, charset, size, text, data in samples()
        if name == language
    ]
    wrong = [(charset, size, found.note) for charset, size, text, found in read if found.text != text]
    # an Italian sentence of one or two accents may be read in several ways
    assert all(size == "sentence" and "it may be" in note for _, size, note in wrong)
    assert len(wrong) <= (5 if language == "italian" else 0), wrong
    guessed = {charset for charset, _, _, found in read if found.note}
    assert guessed == set(HOME[language])
    assert all(", guessed" in found.note for _, _, _, found in read if found.note)


@pytest.mark.parametrize("language", TABLES)
def test_tables_of_nouns(language: str) -> None:
    wrong = [
        (charset, rows, found.note)
        for name, charset, rows, text, data in tables()
        if name == language and (found := decode(data)).text != text
    ]
    # a table of up to three rows may be read in several ways
    assert all(rows <= 3 for _, rows, _ in wrong)
    assert len(wrong) <= 3, wrong


def test_a_price_list_in_cyrillic() -> None:
    text = "Товар;Цена, руб.;Склад\nМолоко;89,50;Северный\nХлеб;45,00;Южный\nСыр;720,30;Северный\n"
    for charset in ("cp1251", "koi8-r", "cp866"):
        assert decode(text.encode(charset)).text == text
    assert decode("Ilość;Cena\n5;7\n".encode("cp1250")).text == "Ilość;Cena\n5;7\n"


def _parsed(data: bytes, name: str) -> Parsed:
    return parse(Raw(data, name, Path(name).suffix))


@pytest.mark.parametrize(
    ("charset", "text"), [(c, t) for c, texts in OTHERS.items() for t in texts], ids=lambda value: value[:12]
)
def test_a_sentence_of_other_languages(charset: str, text: str) -> None:
    assert decode(text.encode(charset)).text == text
    # the lines that tell are found behind pages of ASCII
    late = "Only plain words here.\n" * 5000 + text
    assert decode(late.encode(charset)).text == late


@pytest.mark.parametrize(
    ("charset", "text"),
    [
        ("cp1251", "ТОВАР;ЦЕНА\nМОЛОКО;5\nХЛЕБ;7\n"),
        ("koi8-r", "ТОВАР;ЦЕНА\nМОЛОКО;5\nХЛЕБ;7\n"),
        ("cp866", "ТОВАР;ЦЕНА\nМОЛОКО;5\nХЛЕБ;7\n"),
        ("cp1253", "ΠΡΟΪΟΝ;ΤΙΜΗ\nΓΑΛΑ;5\nΨΩΜΙ;7\n"),
        ("cp1253", "ΌΝΟΜΑ;ΠΌΛΗ\nΆΝΝΑ;ΑΘΉΝΑ\nΓΙΏΡΓΟΣ;ΠΆΤΡΑ\n"),
        ("iso8859-6", "مدينة;سعر\nبغداد;5\nالقاهرة;7\n"),
    ],
)
def test_tables_in_capitals_and_of_unix(charset: str, text: str) -> None:
    assert decode(text.encode(charset)).text == text


@pytest.mark.parametrize(
    ("charset", "name"),
    [("iso2022_jp", "iso2022_jp_ext"), ("utf-16-le", "utf-16-le"), ("utf-16-be", "utf-16-be")],
)
def test_charsets_that_show_themselves(charset: str, name: str) -> None:
    text = "price 商品;200\n" + "rope and net;7\n" * 9
    assert decode(text.encode(charset)) == (text, f"read as {name}, guessed")


def test_a_damaged_character_does_not_change_the_charset() -> None:
    text = "Die Fähre fährt früh über die große Brücke, und für alle Gäste gibt es Frühstück."
    for data in (text.encode() + b"\xff", "ü".encode()[:1] + text.encode()):
        found = decode(data)
        assert found.text.replace("\ufffd", "") == text
        assert found.note == "read as utf-8, with 1 damaged characters"
    assert decode(text.encode("cp1252")).text == text


def test_two_charsets_that_fit_are_both_named() -> None:
    text, note = decode("Procès-verbal".encode("cp1252"))
    assert (text, note) == ("Procès-verbal", "read as cp1252, guessed; it may be cp1250")


def test_what_was_said_about_the_charset_is_believed() -> None:
    assert decode("Łódź".encode("iso8859-2"), "iso-8859-2") == ("Łódź", "")
    assert decode("naïve".encode()) == ("naïve", "")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"text\x00\x00more", "contains NUL bytes; is it binary?"),
        (bytes(range(1, 32)) * 40 + b"\x81\xff", "binary"),
    ],
    ids=["NUL", "controls"],
)
def test_binary_data_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(UnsupportedDocument, match=says.replace("?", r"\?")):
        decode(data)


@pytest.mark.parametrize(
    ("label", "charset", "text"),
    [
        ("iso-8859-1", "cp1252", "“Ready” – it costs 5 €."),
        ("US-ASCII", "cp1252", "“Ready” – it costs 5 €."),
        (" 'latin1' ", "cp1252", "it’s 5 €"),
        ("iso-8859-9", "cp1254", "“Şile” 5 €"),
        ("tis-620", "cp874", "“ราคา” 5 €"),
        ("shift_jis", "cp932", "①㈱山田の髙い本"),
        ("x-sjis", "cp932", "①㈱山田の髙い本"),
        ("gb2312", "gb18030", "镕是人名，€"),
        ("gb_2312-80", "gb18030", "镕是人名"),
        ("euc-kr", "cp949", "똠방각하"),
        ("big5", "big5hkscs", "喺香港"),
        ("koi8_r", "koi8-r", "Цена"),
        ("iso-8859-8-i", "iso8859-8", "מחיר"),
        ("windows-31j", "cp932", "①㈱"),
        ("iso-2022-jp", "iso2022_jp", "山田"),
        ("utf-16", "utf-16-le", "a “quote”"),
    ],
)
def test_labels_stand_for_what_browsers_read(label: str, charset: str, text: str) -> None:
    assert decode(text.encode(charset), label) == (text, "")


def test_valid_utf_8_wins_over_a_label_with_a_note() -> None:
    for label in ("iso-8859-1", "windows-1251", "utf-16", "gb2312"):
        assert decode("café, 5 € – ¡olé!".encode(), label) == (
            "café, 5 € – ¡olé!",
            f"read as utf-8, though labelled {label}",
        )
        assert decode(b"coffee", label) == ("coffee", "")
    assert decode("é".encode(), "iso-8859-1").text == "é"
    assert decode("中文".encode(), "utf-8") == ("中文", "")


def test_pages_are_decoded_by_what_they_say() -> None:
    text = "<p>He said “ready” and it costs 5 €.</p>"
    for long in ("", "<p>" + "It holds until further notice for all of the wards. " * 9 + "</p>"):
        page = f"<html><head><meta charset=iso-8859-1></head><body>{text}{long}</body></html>"
        assert "“ready” and it costs 5 €." in _parsed(page.encode("cp1252"), "p.html").text
    xml = '<?xml version="1.0" encoding="windows-1251"?><html><body><p>Цена</p></body></html>'
    assert _parsed(xml.encode("cp1251"), "p.html").text == "Цена"
    wide = "<html><head><meta charset='utf-16'></head><body><p>Grün, 5 €</p></body></html>"
    found = _parsed(wide.encode(), "p.html")
    assert (found.text, found.note) == ("Grün, 5 €", "read as utf-8, though labelled utf-16")
