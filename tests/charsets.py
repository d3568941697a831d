"""Measure how often text in 8-bit and multi-byte charsets is read right: ragserve beside charset-normalizer.

    python -m tests.charsets --out benchmarks/results/charsets.json

The texts of tests/data/languages, in twenty languages, are written in every charset that has their letters:
whole, by paragraph and by first sentence of a paragraph. So are tables of 1 to 200 rows of the nouns and
prices in tests/data/nouns, in twenty languages, also in capitals, and sentences in further languages. A
reading is right if it gives the text back.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

from charset_normalizer import from_bytes

from ragserve.errors import UnsupportedDocument
from ragserve.ingest.parsers.charset import decode
from ragserve.verification.report import write

TEXTS = Path(__file__).resolve().parent / "data" / "languages"
CHARSETS = (
    "utf-8", "utf-16", "cp1252", "iso8859-1", "iso8859-15", "mac-roman", "cp1250", "iso8859-2", "cp1251",
    "koi8-r", "koi8-u", "cp1253", "iso8859-7", "cp1254", "iso8859-9", "cp932", "euc_jp", "gb18030", "cp949",
)  # fmt: skip
_WESTERN = ("cp1252", "iso8859-1", "iso8859-15", "mac-roman")
HOME = {  # charsets in which a language was written
    **dict.fromkeys(("french", "german", "spanish", "italian", "portuguese"), _WESTERN),
    **dict.fromkeys(("swedish", "danish", "finnish"), _WESTERN),
    **dict.fromkeys(("polish", "czech", "hungarian", "romanian"), ("cp1250", "iso8859-2")),
    "russian": ("cp1251", "koi8-r"),
    "ukrainian": ("cp1251", "koi8-u"),
    "bulgarian": ("cp1251",),
    "greek": ("cp1253", "iso8859-7"),
    "turkish": ("cp1254", "iso8859-9"),
    "japanese": ("cp932", "euc_jp"),
    "chinese": ("gb18030",),
    "korean": ("cp949",),
}
# sentences in further languages, and odd ones, by charset
OTHERS: dict[str, tuple[str, ...]] = {
    "cp1252": (
        "La città è più bella di notte, quando le luci si accendono e tutti escono. Perché non vieni "
        "anche tu?",
        "Não há nada que possa fazer agora; amanhã a situação será outra, e então veremos o coração "
        "da questão.",
        "Det är många som tycker att våren är den bästa tiden på året, när allt börjar växa på nytt.",
        "Når det bliver mørkt, går børnene hjem, og så er der stille på gaden. Hvor længe skal vi vente?",
        "Hän ei tiennyt, että päivä oli jo pitkällä, kun myös sää muuttui ja lämpö väheni.",
        "Það var mjög kalt í gær, svo við vorum heima og lásum bækur um sjóinn.",
        "The café’s résumé—he said it was “naïve”—cost £5 and was not for us.",
        "Müller, Köln\nGroß, Düsseldorf\n",
        "Procès-verbal",
    ),
    "cp1250": (
        "Az őszi erdő csendes volt, és csak a szél zúgott; nem is tudtuk, hogy hová megyünk.",
        "Keď som bol malý, chodil som k starej mame na dedinu, kde sme mali kone a veľký sad.",
        "Kad je došla zima, više nitko nije išao na tržnicu, jer su ceste bile zatvorene.",
        "Łódź, Kraków, Gdańsk\n",
    ),
    "cp1257": ("Vakar buvo labai šalta, todėl mes likome namuose ir skaitėme knygas apie jūrą.",),
    "cp1251": (
        "Учора було дуже холодно, тому ми залишилися вдома і читали книжки про море.",
        "Вчера беше много студено, затова останахме вкъщи и четохме книги за морето.",
    ),
    "cp1255": ("אתמול היה קר מאוד, ולכן נשארנו בבית וקראנו ספרים על הים של הצפון.",),
    "cp1256": ("كان الجو باردا جدا أمس، لذلك بقينا في البيت وقرأنا كتبا عن البحر من هذا النوع.",),
    "cp949": ("어제는 매우 추워서 우리는 집에 머물면서 바다에 관한 책을 읽었다. 그것은 좋은 날이었다.",),
    "big5": ("昨天很冷，所以我們留在家裡看關於大海的書。這是一個很好的日子。",),
    "cp850": ("L'été dernier, nous étions à la plage et la mer était très calme après l'orage.",),
    "cp866": ("Вчера было очень холодно, поэтому мы остались дома и читали книги о море.",),
}
NOUNS = TEXTS.parent / "nouns"
TABLES = {  # languages and charsets of the tables
    "russian": ("cp1251", "koi8-r", "cp866"),
    "ukrainian": ("cp1251", "koi8-u"),
    "bulgarian": ("cp1251",),
    "greek": ("cp1253", "iso8859-7"),
    "hebrew": ("cp1255",),
    "arabic": ("cp1256",),
    "japanese": ("cp932", "euc_jp"),
    "chinese": ("gb18030",),
    "chinese-traditional": ("big5",),
    "korean": ("cp949",),
    "polish": ("cp1250", "iso8859-2"),
    "czech": ("cp1250", "iso8859-2"),
    "hungarian": ("cp1250", "iso8859-2"),
    "turkish": ("cp1254", "iso8859-9"),
    **dict.fromkeys(
        ("german", "french", "spanish", "swedish", "portuguese", "danish"), ("cp1252", "mac-roman")
    ),
}
ROWS = (1, 3, 6, 10, 20, 200)
_TABLE_ROWS = {
    1: "tables of 1 row",
    3: "tables of 3 rows",
    **dict.fromkeys(ROWS[2:], "tables of 6 to 200 rows"),
}
_OTHERS, _CAPITALS = "further languages", "tables in capitals"
# what people wrote in charsets without the character
_PLAIN = str.maketrans(
    {"’": "'", "‘": "'", "“": '"', "”": '"', "„": '"', "«": '"', "»": '"', "–": "-", "—": "-"}
    | {"…": "...", "€": "EUR", "œ": "oe", "ș": "ş", "ț": "ţ"}
)


def samples() -> Iterator[tuple[str, str, str, str, bytes]]:
    """(language, charset, size, text, bytes) of each reading to make."""
    for language, own in HOME.items():
        whole = (TEXTS / f"{language}.txt").read_text(encoding="utf-8")
        paragraphs = whole.strip().split("\n\n")
        pieces = [("text", whole)] + [("paragraph", each) for each in paragraphs]
        pieces += [("sentence", _first_sentence(each)) for each in paragraphs]
        for charset in ("utf-8", "utf-16", *own):
            for size, piece in pieces:
                text = piece
                try:
                    data = text.encode(charset)
                except UnicodeEncodeError:
                    text = piece.translate(_PLAIN)
                    data = text.encode(charset)
                yield language, charset, size, text, data


def tables() -> Iterator[tuple[str, str, int, str, bytes]]:
    """(language, charset, rows, text, bytes) of each table to read, three of each size."""
    for language, charsets in TABLES.items():
        nouns = (NOUNS / f"{language}.txt").read_text(encoding="utf-8").split()
        for charset, rows, first in product(charsets, ROWS, (0, 7, 14)):
            cells = [nouns[(first + at) % len(nouns)] for at in range(2 * rows + 2)]
            lines = [f"{cells[2 * at]};{at * 7 % 90},50;{cells[2 * at + 1]}" for at in range(1, rows + 1)]
            text = "\n".join([f"{cells[0]};EUR;{cells[1]}", *lines, ""])
            if language in ("french", "ukrainian"):
                text = text.translate(_PLAIN)
            yield language, charset, rows, text, text.encode(charset)


def capitals() -> Iterator[tuple[str, str, int, str, bytes]]:
    """The tables in capitals."""
    for language, charset, rows, text, _ in tables():
        upper = text.upper()
        if upper != text:
            yield language, charset, rows, upper, upper.encode(charset)


def others() -> Iterator[tuple[str, str, str, str, bytes]]:
    """The sentences in further languages."""
    for charset, texts in OTHERS.items():
        for text in texts:
            yield "another language", charset, "sentence", text, text.encode(charset)


def _first_sentence(paragraph: str) -> str:
    ends = [paragraph.find(mark) for mark in (". ", "? ", "! ", "。") if mark in paragraph]
    return paragraph[: min(ends) + 1] if ends else paragraph


def by_library(data: bytes) -> tuple[str, str]:
    """charset-normalizer's best guess, without a note."""
    best = from_bytes(data).best()
    return ("" if best is None else str(best)), ""


def measure() -> list[dict[str, Any]]:
    """A row for each charset of prose, one for all of it, and one for tables of each size."""
    rivals: dict[str, Callable[[bytes], tuple[str, str]]] = {"library": by_library, "ragserve": decode}
    rows = {
        name: {"charset": name, "readings": 0, "library": 0, "ragserve": 0}
        for name in (*CHARSETS, "all", _OTHERS, *_TABLE_ROWS.values(), _CAPITALS)
    }
    for row in rows.values():
        row |= {"wrong": 0, "wrong and not said to be a guess": 0, "two charsets named": 0}
    prose = ((*sample, (rows[sample[1]], rows["all"])) for sample in samples())
    lists = ((*table, (rows[_TABLE_ROWS[table[2]]],)) for table in tables())
    further = ((*sample, (rows[_OTHERS],)) for sample in others())
    upper = ((*table, (rows[_CAPITALS],)) for table in capitals())
    for language, charset, size, text, data, counted in chain(prose, further, lists, upper):
        for row in counted:
            row["readings"] += 1
        for name, read in rivals.items():
            try:
                found, note = read(data)
            except UnsupportedDocument as error:
                found, note = "", str(error)
            for row in counted:
                row[name] += found == text
                if name == "ragserve":
                    row["two charsets named"] += "it may be" in note
                    row["wrong"] += found != text
                    row["wrong and not said to be a guess"] += found != text and not note
            if name == "ragserve" and found != text:
                print(f"wrong: {language} in {charset}, {size}: {note}")
    for row in rows.values():
        for name in rivals:
            row[f"{name} %"] = round(100 * row.pop(name) / row["readings"], 1)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the report to this file")
    out = parser.parse_args().out
    workload: dict[str, Any] = {
        "texts": "tests/data/languages",
        "languages": len(HOME),
        "charsets": len(CHARSETS),
    }
    workload |= {"sentences in further languages": sum(map(len, OTHERS.values()))}
    workload |= {"tables": "tests/data/nouns", "languages of tables": len(TABLES)}
    note = (
        "Right readings, %, of whole texts, paragraphs and sentences, and of tables of nouns; library: "
        "charset-normalizer alone."
    )
    write("charsets", workload, measure(), out=out, note=note)


if __name__ == "__main__":
    main()
