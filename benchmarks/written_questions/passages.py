"""The passages that questions are written about, and what may not be asked.

    python -m benchmarks.written_questions.passages DATA OUT

DATA has ``wiki``, ``retrieval_traces_psirag`` and the evaluation sets, a folder each. OUT gets
``passages.jsonl.gz``, lines {id, title, text}; ``asked.txt.gz``, the evaluation sets' questions; and
``passages.json``: counts and the digest of the passages. The same data gives the same bytes.

A passage is left out if its title is one of an evaluation set's passages or has the name of a country of
`examples/corpus`, or if it shares a run of 13 words with any evaluation set. Of the traces, news
(``multihoprag``) is left out: its text is not free."""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import lzma
import random
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.places import CORPUS
from benchmarks.model_recipe.overlap import Evaluated, evaluation_sets, words
from ragserve.files import write_json
from ragserve.json_lines import json_lines

SEED = 51
TRACES = ("nq", "popqa", "hotpotqa", "musique", "2wikimultihopqa")
LEAST_WORDS, MOST_WORDS = 25, 160
_ASIDE = re.compile(r"\s*\([^()]*\)")  # in a title: "Sing (film)" is called Sing


@dataclass(frozen=True, slots=True)
class Passage:
    """``id``: source, article and place in it; the same in every run over the same data."""

    id: str
    title: str
    text: str

    @property
    def name(self) -> str:
        """What the title's subject is called in a text."""
        return _ASIDE.sub("", self.title).strip()


def read_passages(path: Path) -> list[Passage]:
    return [Passage(**row) for _, row in json_lines(path)]


def articles(data: Path) -> Iterator[Passage]:
    """Passages of whole paragraphs of the articles; headings are left away."""
    [path] = sorted((data / "wiki").glob("wiki2021-*.jsonl.xz"))
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines):
            article = json.loads(line)
            paragraphs = [p for p in article["text"].split("\n") if len(p.split()) > 5]
            for place, text in enumerate(packed(paragraphs)):
                yield Passage(f"wiki:{number}:{place}", article["title"], text)


def packed(paragraphs: Iterable[str]) -> Iterator[str]:
    """Join short paragraphs, and cut long ones behind a sentence, to at most `MOST_WORDS` words."""
    sentences = [s for paragraph in paragraphs for s in re.split(r"(?<=[.!?]) (?=[A-Z\"])", paragraph)]
    held: list[str] = []
    n = 0
    for sentence in sentences:
        size = len(sentence.split())
        if held and n + size > MOST_WORDS:
            yield " ".join(held)
            held, n = [], 0
        held.append(sentence)
        n += size
    if held:
        yield " ".join(held)


def retrieved(data: Path) -> Iterator[Passage]:
    """The traces' passages: a line of the title, and the text, which some begin with the title again."""
    for trace in TRACES:
        path = data / "retrieval_traces_psirag" / f"{trace}.docs.jsonl.gz"
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                title, _, text = row["text"].partition("\n")
                again = text.removeprefix(f"{title} ")
                text = again if again[:1].isupper() else text
                yield Passage(f"{trace}:{row['id']}", title.strip(), " ".join(text.split()))


def titles_of(value: Any) -> Iterator[str]:
    """All titles in a record of a set."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "title" and isinstance(inner, str):
                yield inner
            yield from titles_of(inner)
    elif isinstance(value, list):
        if len(value) == 2 and all(isinstance(each, str) for each in value):
            yield value[0]  # [title, text]
        for inner in value:
            yield from titles_of(inner)


def plain(title: str) -> str:
    """A title as it is compared: without what stands in brackets, in lower case."""
    return " ".join(words(_ASIDE.sub("", title)))


class Excluded:
    """Says why a passage may not be used."""

    def __init__(self, sets: Iterable[tuple[str, list[Any]]]) -> None:
        every = list(sets)
        self.evaluated = Evaluated(every)
        self._titles = {plain(title) for _, records in every for title in titles_of(records)} - {""}
        names = {path.stem.lower() for path in (CORPUS / "files").iterdir()}
        countries = sorted(name.replace("-", " ") for name in names)
        self._country = re.compile(rf"\b(?:{'|'.join(map(re.escape, countries))})\b")

    def why(self, passage: Passage) -> str | None:
        n = len(passage.text.split())
        if not LEAST_WORDS <= n <= 2 * MOST_WORDS or not passage.name:
            return "too short or too long"
        if plain(passage.title) in self._titles:
            return "title of an evaluation set"
        if self._country.search(plain(passage.title)):
            return "country of the example corpus"
        return "13 words of an evaluation set" if self.evaluated.repeats(passage.text) else None


def chosen(every: Iterable[Passage], excluded: Excluded) -> tuple[list[Passage], Counter[str]]:
    """The passages in an order drawn by `SEED`, so that any beginning is a fair sample; and what was done."""
    seen: set[str] = set()
    kept, counts = [], Counter[str]()
    for passage in every:
        digest = " ".join(words(passage.text))
        why = "twice" if digest in seen else excluded.why(passage)
        seen.add(digest)
        source = passage.id.partition(":")[0]
        counts[f"{source}, {why or 'kept'}"] += 1
        if why is None:
            kept.append(passage)
    random.Random(SEED).shuffle(kept)
    return kept, counts


def write_lines(path: Path, lines: Iterable[str]) -> str:
    """Write the lines, without a time in the file, and return their SHA-256."""
    whole = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(whole, mtime=0))
    return hashlib.sha256(whole).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    excluded = Excluded(evaluation_sets(given.data))
    kept, counts = chosen((p for source in (articles, retrieved) for p in source(given.data)), excluded)
    lines = (json.dumps(asdict(passage), ensure_ascii=False) for passage in kept)
    digest = write_lines(given.out / "passages.jsonl.gz", lines)
    write_lines(given.out / "asked.txt.gz", sorted(excluded.evaluated.questions))
    about = {"passages": len(kept), "seed": SEED, "sha256": digest, "by source": dict(sorted(counts.items()))}
    write_json(given.out / "passages.json", about)
    print(json.dumps(about, indent=1))


if __name__ == "__main__":
    main()
