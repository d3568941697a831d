"""Tables of text, records, Markdown and old charsets with what parsers have lost."""

from __future__ import annotations

from tests.data.formats.office_parts import Sample

# what fits as well
_GUESSED = {"koi8-r": "koi8-u, guessed", "cp1255": "cp1255, guessed; it may be cp1253"}
_SPLIT = {";": "semicolons", ",": "commas", "|": "bars", "\t": "tabs"}


def _table(lines: str, delimiter: str, *, above: str = "", note: str = "", charset: str = "utf-8") -> Sample:
    """Rows with bars between their cells, written with another delimiter."""
    rows = [line.split("|") for line in lines.strip().split("\n")]
    written = above + "".join(delimiter.join(row) + "\n" for row in rows)
    header, *body = ("| " + " | ".join(row) + " |" for row in rows)
    titles = [line for line in above.split("\n") if line]
    text = "\n\n".join([*titles, "\n".join([header, "|" + "---|" * len(rows[0]), *body])])
    guess = _GUESSED.get(charset, f"{charset}, guessed")
    said = [f"read as {guess}"] if charset != "utf-8" else []
    taken = f"columns split at {_SPLIT[delimiter]}"
    return Sample(written.encode(charset), text, "; ".join([*said, *([note] if note else []), taken]))


def _one_column() -> Sample:
    lines = ["sentence", "It left at nine, and came back.", "It is deep, and long."]
    rows = "\n".join(["| sentence |", "|---|", *(f"| {line} |" for line in lines[1:])])
    return Sample("\n".join([*lines, ""]).encode(), rows, "read as one column")


def _bars() -> Sample:
    return _table("port|opened;closed\nOban|1880;1990\nWick|1890;1991", "|")


def _quotes() -> Sample:
    data = b'id,remark\n1,5" pipe\n2,"6 inch pipe\n3,"two\nlines"\n4,7 inch\n'
    rows = ["id | remark", '1 | 5" pipe', '2 | "6 inch pipe', "3 | two lines", "4 | 7 inch"]
    header, *body = (f"| {row} |" for row in rows)
    note = "columns split at commas; unclosed quotes taken literally in lines 3"
    return Sample(data, "\n".join([header, "|---|---|", *body]), note)


def _wide() -> Sample:
    """A table too wide for a chunk."""
    names = ["time", *(f"sensor_{n}" for n in range(60))]
    rows = [[f"{hour:02}:00", *(str(hour * 100 + n) for n in range(60))] for hour in (11, 12)]
    data = "\n".join(map(",".join, [names, *rows])).encode()
    parts = []
    for row in rows:
        line = first = f"time: {row[0]}"
        for name, value in zip(names[1:], row[1:], strict=True):
            field = f"{name}: {value}"
            if len(line) + len(field) > 300:
                parts.append(line)
                line = first
            line += f"; {field}"
        parts.append(line)
    return Sample(data, "\n\n".join(parts), "columns split at commas")


def _nouns(charset: str, *lines: str) -> Sample:
    return _table("\n".join(lines), ";", charset=charset)


_RUSSIAN = ("Товар|Цена, руб.|Склад", "Молоко|89,50|Северный", "Хлеб|45,00|Южный", "Сыр|720,30|Северный")
_GREEK = ("Προϊόν|Τιμή|Αποθήκη", "Γάλα|1,50|Βόρεια", "Ψωμί|0,90|Νότια", "Τυρί|7,20|Κεντρική")
_HEBREW = ("מוצר|מחיר|מחסן", "חלב|6,50|צפון", "לחם|8,00|דרום", "גבינה|22,30|מרכז")
_ARABIC = ("المنتج|السعر|المخزن", "حليب|6,50|الشمال", "خبز|2,00|الجنوب", "جبن|22,30|المركز")
_JAPANESE = ("商品|値段|倉庫", "牛乳|200|東京の店", "パン|150|大阪の店", "チーズ|480|東京の店")
_POLISH = ("Ilość|Towar|Miejsce", "5|Łódź żaglowa|Gdańsk", "7|Świeca|Kraków", "9|Źdźbło|Łódź")


def _records() -> Sample:
    """Numbers as written, one bad line, one cut off, a name that stands twice."""
    data = (
        b'{"price": 1.10, "big": 1e400, "id": 12345678901234567890}\n{"price": 2.50, "id": \n'
        b'{"a.b": 1, "a": {"b": 2}}\n{"n": 1, "n": 2}\n{"price": 3.'
    )
    text = 'price: 1.10\nbig: 1e400\nid: 12345678901234567890\n\n"a.b": 1\na.b: 2\n\nn: 1, 2'
    return Sample(data, text, "2 lines are not readable as JSON and left out: 2, 5")


_RULES = "---\n\nThe first rule.\n\n---\n\nThe second rule.\n\n```sh\n# no heading\n```\n"


def samples() -> dict[str, Sample]:
    return {
        "decimals.csv": _table("Hafen|Tiefe, m|Breite, m\nOban|8,5|120,0\nWick|6,2|95,5", ";"),
        "bars.csv": _bars(),
        "sentences.csv": _one_column(),
        "titles.csv": _table("port|depth\nOban|8.5\nWick|6.2", ",", above="Harbour report\nSpring 2024\n\n"),
        "quotes.csv": _quotes(),
        "wide.csv": _wide(),
        "tabs.tsv": _table('port|length\nOban|5"\nWick|7,5', "\t"),
        "cp1251.csv": _nouns("cp1251", *_RUSSIAN),
        "koi8-r.csv": _nouns("koi8-r", *_RUSSIAN),
        "cp866.csv": _nouns("cp866", *_RUSSIAN),
        "cp1253.csv": _nouns("cp1253", *_GREEK),
        "cp1255.csv": _nouns("cp1255", *_HEBREW),
        "cp1256.csv": _nouns("cp1256", *_ARABIC),
        "cp932.csv": _nouns("cp932", *_JAPANESE),
        "cp1250.csv": _nouns("cp1250", *_POLISH),
        "records.jsonl": _records(),
        "rules.md": Sample(_RULES.encode(), _RULES),
        "rules-crlf.md": Sample(_RULES.replace("\n", "\r\n").encode(), _RULES.replace("\n", "\r\n")),
        "front.md": Sample(
            b"---\ntitle: Fees\nvalid_until: 2024-03-05\n---\n# Berths\n\nPay.\n", "# Berths\n\nPay.\n"
        ),
        "front-toml.md": Sample(
            b'+++\ntitle = "Fees"\nrate = 1.10\n+++\nPay at the gate.\n', "Pay at the gate.\n"
        ),
        "front-only.md": Sample(b"---\nauthor: Ann\n---\n", "---\nauthor: Ann\n---\n"),
        "cp866.txt": Sample(
            "Вчера было очень холодно, поэтому мы остались дома.\n".encode("cp866"),
            "Вчера было очень холодно, поэтому мы остались дома.\n",
            "read as cp866, guessed",
        ),
    }


METADATA = {
    "front.md": {"valid_until": "2024-03-05"},
    "front-toml.md": {"rate": "1.10"},
    "front-only.md": {"author": "Ann"},
}
"""The metadata of files that have some."""
