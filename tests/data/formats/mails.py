"""Messages, mailboxes and saved pages with what parsers have lost."""

from __future__ import annotations

from tests.data.formats.office_parts import Sample

_HEAD = "From: Ann <ann@example.com>\nTo: bo@example.com"


def _part(kind: str, body: str | bytes) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    return f"Content-Type: {kind}\n\n".encode() + data


def _message(subject: str | bytes, content: bytes) -> bytes:
    """A message whose ``content`` begins with the header of its type."""
    data = subject.encode() if isinstance(subject, str) else subject
    return b"Subject: " + data + f"\n{_HEAD}\nMIME-Version: 1.0\n".encode() + content


def _several(kind: str, *parts: bytes) -> bytes:
    between = b"".join(b"--cut\n" + part + b"\n" for part in parts)
    return f'Content-Type: multipart/{kind}; boundary="cut"\n\n'.encode() + between + b"--cut--\n"


def _text(subject: str, *body: str) -> str:
    return "\n\n".join([f"Subject: {subject}\n{_HEAD}", *body])


def flowed() -> Sample:
    body = "The ferry leaves \nat nine, and \n From Oban it sails on.\n> Is it \n> late?\nNo.\n-- \nAnn\n"
    data = _message("Ferry", _part("text/plain; charset=utf-8; format=flowed", body))
    return Sample(
        data,
        _text("Ferry", "The ferry leaves at nine, and From Oban it sails on.\n> Is it late?\nNo.\n--\nAnn"),
    )


def deleted_spaces() -> Sample:
    data = _message("Words", _part("text/plain; format=flowed; delsp=yes", "Compound wo \nrds are long.\n"))
    return Sample(data, _text("Words", "Compound words are long."))


def raw_header() -> Sample:
    """A subject in the charset of the text, without a word about it."""
    body = "Die Überfahrt nach Köln ist früh, und für alle schön.\n"
    subject = "Überfahrt nach Köln".encode("cp1252")
    data = _message(subject, _part("text/plain; charset=iso-8859-1", body.encode("cp1252")))
    return Sample(data, _text("Überfahrt nach Köln", body.strip()))


def forwarded() -> Sample:
    inner = (
        b"From: boss@example.com\nSubject: Pay\nDate: Mon, 01 Jan 2024 10:00:00 +0000\n\nThe pay is 900.\n"
    )
    data = _message(
        "Fwd", _several("mixed", _part("text/plain", "See below.\n"), _part("message/rfc822", inner))
    )
    text = _text(
        "Fwd",
        "See below.",
        "Subject: Pay\nFrom: boss@example.com\nDate: Mon, 01 Jan 2024 10:00:00 +0000\n\nThe pay is 900.",
    )
    return Sample(data, text)


_TABLE = (
    "<table><tr><th>Ship</th><th>Port</th><th>Day</th></tr><tr><td rowspan=2>Argo</td><td>Oban</td>"
    "<td>Mon</td></tr><tr><td>Oslo</td><td>Tue</td></tr></table>"
)
_TABLE_TEXT = "| Ship | Port | Day |\n|---|---|---|\n| Argo | Oban | Mon |\n| | Oslo | Tue |"


def stub() -> Sample:
    """Plain text that says no more than that there is HTML, and a preheader that no reader sees."""
    html = (
        "<style>.pre {display: none}</style><div class='pre'>marzipan 0000</div>"
        f"<p>The dose is 10<sup>6</sup> units, and every ship has a berth of its own.</p>{_TABLE}"
    )
    plain = _part("text/plain", "Your program needs an HTML viewer.\n")
    data = _message("Sailings", _several("alternative", plain, _part("text/html; charset=utf-8", html)))
    text = _text("Sailings", f"The dose is 10^6 units, and every ship has a berth of its own.\n{_TABLE_TEXT}")
    return Sample(data, text, "left out: 1 hidden passages", "marzipan 0000")


def mailbox() -> Sample:
    lines = []
    for each in (flowed(), raw_header()):
        lines.append(b"From ann@example.com Mon Jan  1 10:00:00 2024\n" + each.data + b"\n")
    return Sample(b"".join(lines), f"{flowed().text}\n\n{raw_header().text}")


def saved_page() -> Sample:
    """A page that a browser saved, quoted-printable, with an image."""
    body = f"<html><body><h1>Sailings</h1><p>The gate opens at six.=20</p>{_TABLE}</body></html>".replace(
        "rowspan=2", "rowspan=3D2"
    )
    page = b"Content-Transfer-Encoding: quoted-printable\n" + _part("text/html; charset=utf-8", body)
    image = b"Content-Transfer-Encoding: base64\n" + _part("image/png", "iVBORw0KGgo=\n")
    data = b"From: <Saved by Blink>\nSubject: Sailings\nMIME-Version: 1.0\n" + _several(
        "related", page, image
    )
    return Sample(data, f"Sailings\nThe gate opens at six.\n{_TABLE_TEXT}")


def samples() -> dict[str, Sample]:
    return {
        "flowed.eml": flowed(),
        "delsp.eml": deleted_spaces(),
        "raw-header.eml": raw_header(),
        "forwarded.eml": forwarded(),
        "stub.eml": stub(),
        "messages.mbox": mailbox(),
        "saved.mht": saved_page(),
    }
