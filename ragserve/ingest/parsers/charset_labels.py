"""The charsets that labels stand for, by the Encoding Standard of the WHATWG, as browsers
read them (https://encoding.spec.whatwg.org/#names-and-labels)."""

from __future__ import annotations

import codecs

# by Python's name of its codec: that of the WHATWG's charset, where it is a larger one
_LARGER = {
    "ascii": "cp1252",
    "iso8859-1": "cp1252",
    "iso8859-9": "cp1254",
    "iso8859-11": "cp874",
    "tis-620": "cp874",
    "shift_jis": "cp932",
    "euc_kr": "cp949",
    "big5": "big5hkscs",
    "gb2312": "gb18030",
    "gbk": "gb18030",
}
# labels that Python does not know, or gives to another charset, by its codec
_UNKNOWN = {
    "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8",
    "utf-16-le": "csunicode iso-10646-ucs-2 ucs-2 unicode unicodefeff utf-16",
    "utf-16-be": "unicodefffe",
    "cp866": "dos-866",
    "iso8859-2": "iso88592",
    "iso8859-3": "iso88593",
    "iso8859-4": "iso88594",
    "iso8859-5": "iso88595",
    "iso8859-6": "asmo-708 csiso88596e csiso88596i iso-8859-6-e iso-8859-6-i iso88596",
    "iso8859-7": "iso88597 sun_eu_greek",
    "iso8859-8": "csiso88598e csiso88598i iso-8859-8-e iso-8859-8-i iso88598 logical visual",
    "iso8859-10": "iso885910",
    "iso8859-13": "iso885913",
    "iso8859-14": "iso885914",
    "iso8859-15": "csisolatin9 iso885915 iso_8859-15",
    "koi8-r": "koi koi8",
    "koi8-u": "koi8-ru",
    "mac-roman": "mac x-mac-roman",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "cp874": "dos-874 windows-874 iso885911",
    "cp1252": "iso88591 x-cp1252",
    "cp1254": "iso88599",
    **{f"cp125{n}": f"x-cp125{n} win125{n} win-125{n}" for n in (0, 1, 3, 5, 6, 7, 8)},
    "gb18030": "csgb2312 csiso58gb231280 gb_2312 gb_2312-80 x-gbk",
    "big5hkscs": "cn-big5 x-x-big5",
    "euc_jp": "x-euc-jp",
    "cp932": "windows-31j x-sjis sjis-win",
    "cp949": "ksc5601 ksc_5601 windows-949",
}
_CHARSETS = {label: charset for charset, labels in _UNKNOWN.items() for label in labels.split()}
# Python's codecs that are no charsets: they read escapes, so ASCII becomes anything, half characters too
_ESCAPES = frozenset({"utf-7", "unicode-escape", "raw-unicode-escape", "punycode", "idna", "undefined"})


def charset_of(label: str) -> str | None:
    """Return Python's name of the codec that reads text with this ``label``; None if it names no charset."""
    label = label.strip(" \t\r\n\f\"'").lower()
    try:
        charset = _CHARSETS.get(label) or codecs.lookup(label).name
        return None if charset in _ESCAPES or not _is_text(charset) else _LARGER.get(charset, charset)
    except (LookupError, ValueError):
        return None


def _is_text(charset: str) -> bool:
    """Return whether a codec makes text of bytes; base64, zip and others do not."""
    try:
        b"".decode(charset)
    except LookupError:
        return False
    return True
