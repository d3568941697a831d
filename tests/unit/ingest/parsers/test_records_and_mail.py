"""Tables of text, JSON records and e-mail, through the parsing process."""

from __future__ import annotations

import json
from email.message import EmailMessage
from pathlib import Path

import pytest

from ragserve.ingest.parsing.parse_process import ParsedFile
from tests.unit.ingest.ingest_samples import ParseFile, assert_fails, places_of, text_of


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", 'name,note\n"Smith, Ann","says ""hi"""\nBo,\n'),
        ("b.csv", 'name;note\n"Smith, Ann";says "hi"\nBo;\n'),
        ("c.csv", 'sep=|\r\nname|note\r\nSmith, Ann|"says ""hi"""\r\n\r\nBo|\r\n'),
        ("d.tsv", 'name\tnote\nSmith, Ann\t"says ""hi"""\nBo\n'),
    ],
)
def test_csv_in_its_dialects(name: str, content: str, tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / name
    path.write_text(content, newline="")
    assert text_of(parse(path)) == '| name | note |\n|---|---|\n| Smith, Ann | says "hi" |\n| Bo |  |'


def test_a_long_csv_keeps_its_header_in_an_old_charset(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.csv"
    rows = "".join(f"Müller {n};Straße {n};{n}\n" for n in range(200))
    path.write_bytes(f"Größe;Straße;Nummer\n{rows}".encode("cp1252"))
    result = parse(path)
    assert isinstance(result, ParsedFile)
    assert len(result.chunks) > 5
    assert all("| Größe | Straße | Nummer |\n|---|---|---|\n" in chunk.text for chunk in result.chunks)
    assert "cp1252" in result.note


def test_json_lines_and_arrays_are_records(tmp_path: Path, parse: ParseFile) -> None:
    records = [
        {
            "name": "Oslo",
            "geo": {"lat": 59.9, "coast": True},
            "names": ["Christiania", "Kristiania"],
            "x": None,
        },
        {"name": "Bergen", "roads": [{"to": "Oslo", "km": 463}]},
    ]
    text = (
        "name: Oslo\ngeo.lat: 59.9\ngeo.coast: true\nnames: Christiania, Kristiania\n\n"
        "name: Bergen\nroads.1.to: Oslo\nroads.1.km: 463"
    )
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, records)) + "\n\n")
    (tmp_path / "a.json").write_text(json.dumps(records, indent=2))
    (tmp_path / "b.jsonl").write_text(json.dumps(records))
    for name in ("a.jsonl", "a.json", "b.jsonl"):
        result = parse(tmp_path / name)
        assert text_of(result) == text, name
    (tmp_path / "settings.json").write_text('{"port": 8080}')
    result = parse(tmp_path / "settings.json")
    assert isinstance(result, ParsedFile)
    assert (text_of(result), result.metadata) == ('{"port": 8080}', {"language": "json"})


@pytest.mark.parametrize(
    ("name", "content", "text", "note"),
    [
        ("a.jsonl", '{"a": 1}\n{"a": 2\n\n{"a": 3}', "a: 1\n\na: 3", "1 lines are not readable"),
        ("a.jsonl", '{"a": 1}{"a": 2},\n{"a" 3}', "a: 1\n\na: 2", "1 lines are not readable"),
        ("b.jsonl", '{\n "a": 1\n}\n{\n "a": 2\n}\n', "a: 1\n\na: 2", ""),
        ("b.json", '[{"a": 1},\n{"a": 2},\n]', "a: 1\n\na: 2", ""),
        ("a.json", '[{"a": 1}, {"a": [2, 3]}, {"a": ', "a: 1\n\na: 2, 3", "1 records are not readable"),
        ("a.json", '[\n{"a": 1},\n{"a" 2},\n{"a": 3}\n]', "a: 1\n\na: 3", "1 records are not readable"),
    ],
)
def test_a_bad_record_costs_no_other(
    name: str, content: str, text: str, note: str, tmp_path: Path, parse: ParseFile
) -> None:
    (tmp_path / name).write_text(content)
    result = parse(tmp_path / name)
    assert text_of(result) == text
    assert isinstance(result, ParsedFile)
    assert result.note.startswith(note)
    assert bool(result.note) == bool(note)


@pytest.mark.parametrize(
    ("record", "n", "note"),
    [("{},", 400_000, "1 records are not readable"), ("\n{,", 25_000, "25,000 records are not readable")],
)
def test_a_long_damaged_array_is_gone_through_once(
    record: str, n: int, note: str, tmp_path: Path, parse: ParseFile
) -> None:
    """Searched from its start for each record, it takes longer than a file may."""
    unread = '{"' + "x" * 2**25 + '": null},'
    (tmp_path / "a.json").write_text(f'[{{"a": 1}},{unread}{record * n}{{"b')
    result = parse(tmp_path / "a.json")
    assert text_of(result) == "a: 1"
    assert isinstance(result, ParsedFile)
    assert result.note.startswith(note)


def test_numbers_and_names_stay_as_they_are_written(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(
        '{"price": 1.10, "big": 1e400, "id": 12345678901234567890.0, "none": NaN}\n'
        '{"a.b": 1, "a": {"b": 2}, "c.d": 3}\n{"a": 1, "a": 2}'
    )
    assert text_of(parse(path)) == (
        "price: 1.10\nbig: 1e400\nid: 12345678901234567890.0\nnone: NaN\n\n"
        '"a.b": 1\na.b: 2\nc.d: 3\n\na: 1, 2'
    )


def message(subject: str = "Größe der Wale", **headers: str) -> EmailMessage:
    mail = EmailMessage()
    for name, value in {
        "Subject": subject,
        "From": "Ann <ann@example.com>",
        "To": "bo@example.com",
        **headers,
    }.items():
        mail[name] = value
    return mail


def test_a_message_is_read_and_its_attachments_are_named(tmp_path: Path, parse: ParseFile) -> None:
    mail = message(Date="Mon, 01 Jan 2024 10:00:00 +0000")
    mail.set_content("Wale sind groß.\n", charset="iso-8859-1")
    mail.add_alternative("<p>In <b>HTML</b>.</p>", subtype="html")
    mail.add_attachment(b"%PDF-1.7", maintype="application", subtype="pdf", filename="Wale.pdf")
    path = tmp_path / "a.eml"
    path.write_bytes(mail.as_bytes())
    result = parse(path)
    assert text_of(result) == (
        "Subject: Größe der Wale\nFrom: Ann <ann@example.com>\nTo: bo@example.com\n"
        "Date: Mon, 01 Jan 2024 10:00:00 +0000\n\nWale sind groß.\n\nAttachments: Wale.pdf"
    )
    assert isinstance(result, ParsedFile)
    assert result.title == "Größe der Wale"


def test_a_message_without_plain_text_is_read_from_its_html(tmp_path: Path, parse: ParseFile) -> None:
    mail = message("News")
    mail.set_content("<html><style>p{}</style><p>Only <b>HTML</b> here.</p></html>", subtype="html")
    path = tmp_path / "a.eml"
    path.write_bytes(mail.as_bytes())
    assert text_of(parse(path)).endswith("\n\nOnly HTML here.")


def test_odd_messages_are_read_as_far_as_they_go(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "odd.eml"
    path.write_bytes(
        b"Subject: =?no-such-charset?q?Sea?= \xff and more\r\n"
        b"Content-Type: multipart/mixed; boundary=x\r\n\r\n"
        b"--x\r\nContent-Type: text/plain; charset=no-such\r\n\r\nThe bell \xe2\x80\x94 rings.\r\n"
    )
    text = text_of(parse(path))
    assert "and more" in text
    assert "The bell — rings." in text


def test_messages_of_a_mailbox_are_pages(tmp_path: Path, parse: ParseFile) -> None:
    secret = b"Subject: Secret\r\nContent-Type: multipart/encrypted; boundary=x\r\n\r\n--x--\r\n"
    mails = []
    for subject, body in (
        ("First", "Whales sing.\n\n>From here on they dive.\n"),
        ("Last", "Otters swim.\n"),
    ):
        mail = message(subject)
        mail.set_content(body)
        mails.append(mail.as_bytes())
    box = b"".join(
        b"From ann@example.com Mon Jan  1 10:00:00 2024\n" + each + b"\n"
        for each in (mails[0], secret, mails[1])
    )
    for name in ("a.mbox", "Inbox"):
        path = tmp_path / name
        path.write_bytes(box)
        result = parse(path)
        places = places_of(result)
        assert [page for page, _ in places] == [1, 3]
        assert places[0][1].startswith("Subject: First")
        assert "Otters swim." in places[1][1]
        assert isinstance(result, ParsedFile)
        assert result.metadata == {"pages": 3, "page_kind": "message"}
        assert result.note == "1 messages are encrypted or damaged: 2"


def test_lines_that_begin_with_from_end_no_message(tmp_path: Path, parse: ParseFile) -> None:
    path = tmp_path / "a.mbox"
    path.write_bytes(
        b"From a@x Mon Jan  1 10:00:00 2024\r\nSubject: A\r\n\r\n>From here on.\r\nFrom me to you\r\n\r\n"
        b"From b@x Tue Jan  2 10:00:00 2024 +0100\nSubject: B\n\nSecond.\n"
    )
    places = places_of(parse(path))
    assert [text.split("\n\n", 1)[1] for _, text in places] == ["From here on.\nFrom me to you", "Second."]


def bad_files() -> dict[str, tuple[bytes, str, str]]:
    """name -> (content, code, a word of the reason)."""
    sealed = b"Subject: x\nContent-Type: application/pkcs7-mime; smime-type=enveloped-data\n\nMIIB\n"
    return {
        "blank.csv": (b",,\n,,\n", "empty_document", "no letter"),
        "binary.csv": (bytes(range(256)) * 8, "undecodable", "binary"),
        "cut.jsonl": (b'{"a": 1\n{"a": 2\n', "corrupt_document", "line 1"),
        "cut.json": (b'[{"a": ', "corrupt_document", "JSON"),
        "deep.json": (b'[{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}]", "corrupt_document", "deep"),
        "hollow.jsonl": (b"{}\nnull\n", "empty_document", "no text"),
        "sealed.eml": (sealed, "encrypted_document", "encrypted"),
        "sealed.mbox": (b"From a Mon Jan  1 10:00:00 2024\n" + sealed, "encrypted_document", "no readable"),
    }


@pytest.mark.parametrize("name", list(bad_files()))
def test_a_bad_file_fails_with_its_reason(name: str, tmp_path: Path, parse: ParseFile) -> None:
    assert_fails(parse, tmp_path / name, *bad_files()[name])


@pytest.mark.parametrize("name", ["a.eml", "a.mbox", "a.txt"])
def test_text_with_a_wrong_name_is_text(name: str, tmp_path: Path, parse: ParseFile) -> None:
    text = "From the spring of 2024\non: whales sing, and nobody knows why."
    (tmp_path / name).write_text(text)
    assert text_of(parse(tmp_path / name)) == text
