"""CPU time of parsing in this checkout beside that of another one, on the same files, in turns.

    python -m benchmarks.parse_speed BEFORE ARTICLES.jsonl.xz [--articles 300] [--out FILE.json]

BEFORE is a checkout of the commit to compare with, ARTICLES has {title, text} a line. The files are the
example corpus, the articles as Markdown, and some of them in each other format. A process of each checkout
parses them once for its caches, then in turns; each round begins with the other one.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import lzma
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from email.message import EmailMessage
from html import escape
from pathlib import Path
from typing import IO, Any

import docx
import fpdf
import pptx
import xlsxwriter

from benchmarks.lib.places import CORPUS, REPO
from ragserve.verification import report

NOTE = (
    "CPU time to parse all files of a kind once, medians; a process of each checkout, in turns, and each "
    "round begins with the other one. ratio: the median of the rounds' ratios. Goal: at most 1.1 for the "
    "example corpus and the articles."
)
_CHILD = """
import sys, time
from pathlib import Path
import ragserve
from ragserve.ingest.parsers import Raw, parse
assert Path(ragserve.__file__).is_relative_to(Path.cwd()), ragserve.__file__
for folder in sys.stdin:
    files = [(at.name, at.suffix, at.read_bytes()) for at in sorted(Path(folder.strip()).iterdir())]
    start = time.process_time()
    for name, ext, data in files:
        parse(Raw(data, name, ext))
    print(time.process_time() - start, flush=True)
"""


def _blocks(text: str) -> list[str]:
    return [block for block in text.split("\n") if block.strip()]


def _rows(text: str) -> list[list[str | int | float]]:
    """A table of an article's sentences, and of figures about them."""
    found = [each.strip() for each in re.split(r"(?<=[.!?])\s", text) if each.strip()]
    figures = [[n, each, len(each), len(each.split()) / len(each)] for n, each in enumerate(found, 1)]
    return [["number", "sentence", "characters", "words per character"], *figures]


def _html(title: str, text: str) -> bytes:
    paragraphs = "".join(f"<p>{escape(block)}</p>\n" for block in _blocks(text))
    cells = "".join(f"<tr><td>{n}<td>{escape(str(each)[:80])}" for n, each, *_ in _rows(text)[:12])
    menu = "".join(f"<li><a href='/{n}'>Part {n}</a>" for n in range(20))
    body = f"<nav><ul>{menu}</ul></nav><article><h1>{escape(title)}</h1>{paragraphs}<table>{cells}</table>"
    return f"<!doctype html><html><head><title>{escape(title)}</title></head><body>{body}</html>".encode()


def _pdf(title: str, text: str) -> bytes:
    pdf = fpdf.FPDF()
    pdf.set_font("Times", size=11)
    pdf.add_page()
    pdf.multi_cell(0, 5, "\n\n".join([title, *_blocks(text)]).encode("latin-1", "replace").decode("latin-1"))
    return bytes(pdf.output())


def _docx(title: str, text: str) -> bytes:
    document: Any = docx.Document()
    document.add_heading(title)
    for block in _blocks(text):
        document.add_paragraph(block)
    rows = _rows(text)[:12]
    table = document.add_table(len(rows), 2)
    for at, row in enumerate(rows):
        table.cell(at, 0).text, table.cell(at, 1).text = str(row[0]), str(row[1])
    return _saved(document.save)


def _pptx(title: str, text: str) -> bytes:
    deck: Any = pptx.Presentation()
    for block in _blocks(text):
        slide = deck.slides.add_slide(deck.slide_layouts[1])
        slide.shapes.title.text, slide.placeholders[1].text = title, block
    return _saved(deck.save)


def _xlsx(title: str, text: str) -> bytes:
    out = io.BytesIO()
    with xlsxwriter.Workbook(out) as book:
        sheet = book.add_worksheet()
        formats = [
            None,
            None,
            book.add_format({"num_format": "#,##0"}),
            book.add_format({"num_format": "0.0%"}),
        ]
        for at, row in enumerate(_rows(text)):
            for place, (value, form) in enumerate(zip(row, formats, strict=True)):
                sheet.write(at, place, value, form)
    return out.getvalue()


def _csv(title: str, text: str) -> bytes:
    out = io.StringIO()
    csv.writer(out).writerows(_rows(text))
    return out.getvalue().encode()


def _eml(title: str, text: str) -> bytes:
    mail = EmailMessage()
    mail["Subject"], mail["From"], mail["To"] = " ".join(title.split()), "ann@example.com", "bo@example.com"
    mail.set_content(text)
    mail.add_alternative(_html(title, text).decode(), subtype="html")
    return mail.as_bytes()


def _saved(save: Callable[[IO[bytes]], object]) -> bytes:
    out = io.BytesIO()
    save(out)
    return out.getvalue()


FORMATS: dict[str, Callable[[str, str], bytes]] = {
    "html": _html,
    "pdf": _pdf,
    "docx": _docx,
    "pptx": _pptx,
    "xlsx": _xlsx,
    "csv": _csv,
    "eml": _eml,
    "jsonl": lambda title, text: b"\n".join(
        json.dumps({"title": title, "row": r}).encode() for r in _rows(text)
    ),
    "txt": lambda title, text: f"{title}\n\n{text}".encode(),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path)
    parser.add_argument("articles_file", type=Path)
    parser.add_argument("--articles", type=int, default=300)
    parser.add_argument("--of-format", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--kinds", nargs="*", help="only these, such as pdf")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        places = write_files(Path(folder), given.articles_file, given.articles, given.of_format)
        kinds = given.kinds or list(places)
        seconds = measure([places[kind] for kind in kinds], (given.before.resolve(), REPO), given.rounds)
        sizes = [len(list(places[kind].iterdir())) for kind in kinds]
    rows = [_row(kind, n, *each) for kind, n, each in zip(kinds, sizes, seconds, strict=True)]
    workload = {"articles": given.articles, "of each format": given.of_format, "rounds": given.rounds}
    report.write("parse-speed", workload | {"before": _commit(given.before)}, rows, out=given.out, note=NOTE)


def write_files(folder: Path, articles_file: Path, n_articles: int, of_format: int) -> dict[str, Path]:
    """Write the files. Returns the folders, by what is in them."""
    with lzma.open(articles_file, "rt", encoding="utf-8") as lines:
        articles = [json.loads(line) for line, _ in zip(lines, range(n_articles), strict=False)]
    places = {name: folder / name for name in ("example corpus", "articles", *FORMATS)}
    for place in places.values():
        place.mkdir()
    for file in (CORPUS / "files").iterdir():
        shutil.copy(file, places["example corpus"])
    for at, each in enumerate(articles):
        title, text = each["title"], each["text"]
        (places["articles"] / f"{at:03}.md").write_text(f"# {title}\n\n{text}\n", encoding="utf-8")
        for name, write in FORMATS.items() if at < of_format else ():
            (places[name] / f"{at:03}.{name}").write_bytes(write(title, text))
    return places


def measure(
    folders: Sequence[Path], checkouts: Sequence[Path], rounds: int
) -> list[tuple[list[float], list[float]]]:
    """CPU seconds of each round, for each folder, in the first and in the second checkout."""
    children = [
        subprocess.Popen(
            [sys.executable, "-c", _CHILD],
            cwd=each,
            env={"PYTHONPATH": f"{each}:{each / 'index'}:{each / 'kernels'}", "PATH": "/usr/bin:/bin"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for each in checkouts
    ]
    found: list[tuple[list[float], list[float]]] = [([], []) for _ in folders]
    for at in range(rounds + 1):
        for folder, taken in zip(folders, found, strict=True):
            for side in (0, 1) if at % 2 else (1, 0):
                seconds = _parse(children[side], folder)
                taken[side].append(seconds)
    for child in children:
        child.communicate()
    return [(before[1:], after[1:]) for before, after in found]  # the first round fills caches


def _parse(child: subprocess.Popen[str], folder: Path) -> float:
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(f"{folder}\n")
    child.stdin.flush()
    return float(child.stdout.readline())


def _row(kind: str, n_files: int, before: list[float], after: list[float]) -> dict[str, Any]:
    ratios = [new / old for old, new in zip(before, after, strict=True)]
    return {
        "files": kind,
        "n": n_files,
        "before ms": round(1000 * statistics.median(before), 1),
        "now ms": round(1000 * statistics.median(after), 1),
        "ratio": round(statistics.median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }


def _commit(checkout: Path) -> str:
    shown = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=checkout, capture_output=True, text=True, check=True
    )
    return shown.stdout.strip()


if __name__ == "__main__":
    main()
