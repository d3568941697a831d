"""Mail: soft lines, alternatives, messages in messages, raw headers, saved pages of the web."""

from __future__ import annotations

from email.message import EmailMessage

import pytest

from ragserve.ingest.parsers import Parsed, Raw, parse
from ragserve.ingest.parsers.flowed import unflowed


def _parsed(data: bytes, name: str = "a.eml", **taken: bool) -> Parsed:
    return parse(Raw(data, name, "." + name.rsplit(".", 1)[1], **taken))


def _body(data: bytes, **taken: bool) -> str:
    return _parsed(data, **taken).text.split("\n\n", 1)[1]


def test_soft_lines_are_joined() -> None:
    text = "The ferry leaves \nat nine.\n\n From Oban \nto Mull.\n> Who is the \n> master?\n>> I \nam."
    text += "\n-- \nMorag \n"
    assert unflowed(text) == (
        "The ferry leaves at nine.\n\nFrom Oban to Mull.\n> Who is the master?\n>> I\nam.\n--\nMorag"
    )
    assert unflowed("Compound wo \nrd and \n two", delete_spaces=True) == "Compound word andtwo"
    head = b"Subject: Ferry\nContent-Type: text/plain; format=flowed; delsp="
    assert _body(head + b"no\n\nat \nnine") == "at nine"
    assert _body(head + b"yes\n\nwo \nrd") == "word"
    assert _body(b"Subject: Ferry\nContent-Type: text/plain\n\nat \nnine") == "at \nnine"


def test_a_forwarded_message_has_its_own_sender() -> None:
    inner = EmailMessage()
    inner["From"], inner["Subject"], inner["Date"] = (
        "boss@example.org",
        "Pay",
        "Mon, 01 Jan 2024 10:00:00 +0000",
    )
    inner.set_content("The pay is 900.")
    inner.add_attachment(b"x", maintype="application", subtype="pdf", filename="pay.pdf")
    outer = EmailMessage()
    outer["From"], outer["Subject"] = "a@example.org", "Fwd: Pay"
    outer.set_content("See below.")
    outer.add_attachment(inner)
    assert _parsed(outer.as_bytes()).text == (
        "Subject: Fwd: Pay\nFrom: a@example.org\n\nSee below.\n\n"
        "Subject: Pay\nFrom: boss@example.org\nDate: Mon, 01 Jan 2024 10:00:00 +0000\n\nThe pay is 900.\n\n"
        "Attachments: pay.pdf"
    )


@pytest.mark.parametrize("charset", ["utf-8", "cp1252"])
@pytest.mark.parametrize("label", ["", "; charset={}"])
def test_raw_headers_are_read_in_the_charset_of_the_text(charset: str, label: str) -> None:
    source = (
        f"Subject: Überfahrt nach Köln\nFrom: Jürgen <j@example.org>\nContent-Type: text/plain{label}\n\n"
        "Die Fähre fährt über den Fluss, und die Überfahrt ist nicht für alle.\n"
    )
    found = _parsed(source.format(charset).encode(charset))
    assert found.title == "Überfahrt nach Köln"
    assert found.text.startswith("Subject: Überfahrt nach Köln\nFrom: Jürgen <j@example.org>\n\nDie Fähre")


def test_encoded_words_are_read_as_mail_programs_do() -> None:
    subject = b"Subject: =?iso-8859-1?q?=93Ready=94_5_=80?= and =?iso-8859-1?q?more?= x\n\nText."
    assert _parsed(subject).title == "“Ready” 5 € and more x"
    assert _parsed(b"Subject: =?utf-8?b?broken\n\nText.").title == "=?utf-8?b?broken"


def test_japanese_headers_may_be_raw() -> None:
    head = b"Subject: " + "価格表".encode("iso2022_jp")
    data = head + b"\nContent-Type: text/plain; charset=iso-2022-jp\n\n" + "五百円".encode("iso2022_jp")
    assert _parsed(data).text == "Subject: 価格表\n\n五百円"


def test_several_parts_without_a_boundary_are_text() -> None:
    assert _body(b"Subject: A\nContent-Type: multipart/mixed\n\nPlain words.\n") == "Plain words."


def test_an_invitation_does_not_stand_for_the_text() -> None:
    mail = EmailMessage()
    mail["Subject"] = "Meeting"
    mail.set_content("At nine.")
    mail.add_alternative("BEGIN:VCALENDAR\nSUMMARY:Meeting\nEND:VCALENDAR\n", subtype="calendar")
    assert _body(mail.as_bytes()) == "At nine."


def _alternatives(plain: str, html: str) -> bytes:
    mail = EmailMessage()
    mail["Subject"] = "News"
    mail.set_content(plain)
    mail.add_alternative(html, subtype="html")
    return mail.as_bytes()


def test_html_is_read_beside_a_stub() -> None:
    html = "<p>The ferry to Barra leaves at nine from pier four, and comes back at five.</p>"
    assert "pier four" in _body(_alternatives("This message needs an HTML viewer.", html))
    assert _body(_alternatives("Ferry to Barra leaves at nine from pier four, comes back at five", html)) == (
        "Ferry to Barra leaves at nine from pier four, comes back at five"
    )


def test_preheaders_are_left_out_and_counted() -> None:
    html = (
        "Subject: x\nContent-Type: text/html\n\n<html><head><style>@media (max-width:9px) {.b {display:none}}"
        " .pre, td.gone {display:none!important}</style></head><body><div class='pre'>wombat</div>"
        "<div style='display:none;max-height:0'>wombat</div><p class='b'>The pier opens.</p></body></html>"
    )
    found = _parsed(html.encode())
    assert found.text == "Subject: x\n\nThe pier opens."
    assert found.note == "left out: 2 hidden passages"
    assert _parsed(html.encode(), hidden=True).text.count("wombat") == 2


@pytest.mark.parametrize("name", ["page.mht", "page.mhtml"])
def test_a_saved_page_is_read_as_a_page(name: str) -> None:
    data = (
        b"From: <Saved by Blink>\nSnapshot-Content-Location: http://example.org/\nSubject: Tides\n"
        b'MIME-Version: 1.0\nContent-Type: multipart/related; type="text/html"; boundary="B"\n\n'
        b"--B\nContent-Type: text/html; charset=iso-8859-1\nContent-Transfer-Encoding: quoted-printable\n\n"
        b"<html><body><p>High water is at six=2C 5 =80.=20</p></body></html>\n"
        b"--B\nContent-Type: text/css\n\np {color: red}\n"
        b"--B\nContent-Type: image/png\nContent-Transfer-Encoding: base64\n\niVBORw0KGgo=\n--B--\n"
    )
    found = _parsed(data, name)
    assert (found.title, found.text) == ("Tides", "High water is at six, 5 €.")
