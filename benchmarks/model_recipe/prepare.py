"""Make the training data: read the raw sources, leave out what evaluation sets hold, and pack the rest.

    python -m benchmarks.model_recipe.prepare RAW EVAL_DIR PACKED

RAW is laid out as ``README.md`` says. Country profiles are formatted, parsed and cut into passages by the
product's own code, as for examples/corpus; its countries are left out. Needs ragserve, no GPU; takes about
ten minutes."""

from __future__ import annotations

import argparse
import json
import lzma
import random
import re
import sys
import zlib
from collections import Counter as Counts
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.model_recipe import sources, squad_parts
from benchmarks.model_recipe.corpus import MODEL
from benchmarks.model_recipe.facts import facts_of
from benchmarks.model_recipe.overlap import Evaluated, evaluation_sets
from benchmarks.model_recipe.patterns import found_in
from examples.corpus.make_corpus import FORMATS, WRITERS
from ragserve.ingest.chunking import Chunker
from ragserve.ingest.parsers import Raw, parse
from ragserve.ingest.tokenizer import Counter, TokenizerSource

CHUNK_TOKENS = 256  # the default of `ragserve ingest`
CORPUS_COUNTRIES = {title for titles in FORMATS.values() for title in titles}
SEED = 15
ARTICLE_CHARACTERS = 7000  # at most, of the extracted ones: what travels to a lent GPU is limited
ARTICLES_A_FILE = 12_000
HELD_OUT = {"articles": 100, "reading": 40, "facts": 25}
"""One of so many articles, passages and countries is never trained on."""
_LEGISLATURE = re.compile(r"(?:uni|bi|tri)cameral (?P<name>[A-Z][^;]+?)(?= or |;| consists)")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("raw", type=Path)
    parser.add_argument("sets", type=Path)
    parser.add_argument("packed", type=Path)
    parser.add_argument("--only", default="articles,reading,facts,multi", help="parts to make")
    options = parser.parse_args()
    options.packed.mkdir(parents=True, exist_ok=True)
    evaluated = Evaluated(evaluation_sets(options.sets))
    wanted = options.only.split(",")
    if "articles" in wanted:
        left, kept = split("articles", kept_articles(options.raw, evaluated), lambda row: row[0])
        pack(options.packed / "heldout", "articles", left)
        pack(options.packed / "heldout", "patterns", patterns(left))
        for at in range(0, len(kept), ARTICLES_A_FILE):
            name = f"articles-{at // ARTICLES_A_FILE + 1}"
            pack(options.packed, name, kept[at : at + ARTICLES_A_FILE])
        pack(options.packed, "patterns", patterns(kept))
        (options.packed / "names.json").write_text(json.dumps(names(kept), ensure_ascii=False))
    if "reading" in wanted:
        left, kept = split("reading", reading(options.raw, evaluated), lambda row: row[2][:60])
        pack(options.packed / "heldout", "reading", left)
        pack(options.packed, "reading", kept)
    if "facts" in wanted:
        left, kept = split("facts", profiles(options.raw / "factbook", evaluated), lambda row: row[1])
        pack(options.packed / "heldout", "facts", left)
        pack(options.packed, "facts", kept)
    if "multi" in wanted:
        pack(options.packed, "multi", multi(options.raw, evaluated))
    return 0


def split(part: str, rows: Iterable[Any], name: Callable[[Any], str]) -> tuple[list[Any], list[Any]]:
    """Return what is left out and what is trained on, by a hash of the name."""
    found: tuple[list[Any], list[Any]] = ([], [])
    for row in rows:
        found[zlib.crc32(name(row).encode()) % HELD_OUT[part] != 0].append(row)
    return found


def pack(folder: Path, name: str, rows: Iterable[Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path, n = folder / f"{name}.jsonl.xz", 0
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            n += 1
    print(f"{name}: {n} rows, {path.stat().st_size / 2**20:.1f} MiB", flush=True)


def kept_articles(raw: Path, evaluated: Evaluated) -> list[tuple[str, str]]:
    """Articles and their paragraphs without a run of words of an evaluation set, in random order; none about
    a country of the example corpus."""
    found = [
        *sources.extracted(raw / "enwiki", ARTICLE_CHARACTERS),
        *sources.wiki_articles(raw / "wiki2021.jsonl.xz"),
        *sources.summaries(raw / "summaries.json"),
    ]
    kept = []
    for title, text in dict(found).items():
        own = "\n".join(p for p in text.split("\n") if not evaluated.repeats(p))
        if len(own) > 150 and title not in CORPUS_COUNTRIES and not evaluated.repeats(own):
            kept.append((title, own))
    random.Random(SEED).shuffle(kept)
    return kept


def patterns(articles: list[tuple[str, str]]) -> Iterator[Any]:
    """Rows (article, paragraph, kind, word, answer)."""
    for i, (title, text) in enumerate(articles):
        for found in found_in(title, text.split("\n")):
            yield [i, *found]


def reading(raw: Path, evaluated: Evaluated) -> Iterator[Any]:
    """Rows (source, title, passage, [(question, answer)])."""
    sets = [sources.squad_like(p, p.stem) for p in sorted((raw / "squadshifts").glob("*.json"))]
    sets.append(sources.qamr(raw / "qamr"))
    sets += [sources.squad_like(p, "policyqa") for p in sorted((raw / "policyqa").glob("*.json"))]
    sets.append(sources.nq_oracle(raw / "nq-open-oracle.jsonl.gz"))
    sets.append(squad_parts.readings(raw / "squad_parts", sources.extracted(raw / "enwiki", 10**6)))
    dropped: Counts[str] = Counts()
    for each in (row for rows in sets for row in rows):
        qas = [(q, a) for q, a in each.qas if not evaluated.asked(q) and len(a) <= 160]
        dropped[each.source] += len(each.qas) - len(qas)
        if evaluated.repeats(each.text) or not qas:
            dropped[each.source] += len(qas)
            continue
        yield [each.source, each.title, each.text, qas]
    print("questions left out", dict(dropped))


def profiles(folder: Path, evaluated: Evaluated) -> Iterator[Any]:
    """Rows (year, country, [passage], [(passage, field, answer)]) of countries outside the example corpus."""
    rng = random.Random(SEED)
    count = Counter(TokenizerSource.load(str(MODEL)))
    chunker = Chunker(count, CHUNK_TOKENS)
    for year in sorted(p for p in folder.iterdir() if p.is_dir()):
        for country, sections in sources.factbook(year):
            if any(country in (title, f"the {title}") for title in CORPUS_COUNTRIES):
                continue
            chosen = {name: some_of(lines, rng) for name, lines in sections.items()}
            title, chunks = passages(country, {n: ls for n, ls in chosen.items() if ls}, chunker, rng)
            if any(evaluated.repeats(chunk) for chunk in chunks):
                chunks = ["" if evaluated.repeats(chunk) else chunk for chunk in chunks]
            facts = facts_of([line for lines in chosen.values() for line in lines], chunks)
            if len(facts) >= 5:
                yield [year.name, country, title, chunks, facts]


def some_of(lines: list[str], rng: random.Random) -> list[str]:
    """A profile has most short fields and a few long ones, under this or that edition's names."""
    kept = [renamed(line, rng) for line in lines if len(line) < 200 or rng.random() < 0.5]
    return [line[:1500] for line in kept if rng.random() < 0.75]


def renamed(line: str, rng: random.Random) -> str:
    """Return the line with the field name of a later edition, in a part of the cases."""
    name, _, value = line.partition(":")
    match = _LEGISLATURE.search(value) if name == "Legislative branch - description" else None
    if match:
        return f"Legislative branch - legislature name: {match.group('name').strip()}"
    later = {
        "National symbol(s)": value.split("; national colors")[0],
        "Exchange rates": value,
        "Population": value,
    }
    labels = {"Exchange rates": "Exchange rates - Currency", "Population": "Population - total"}
    if name in later and rng.random() < 0.7:
        return f"{labels.get(name, name)}:{later[name]}"
    return line


def passages(
    country: str, sections: dict[str, list[str]], chunker: Chunker, rng: random.Random
) -> tuple[str, list[str]]:
    """Return title and chunks of a profile that went through a file of a random format."""
    ext = rng.choice(list(WRITERS))
    name = re.sub(r"[^a-z]+", "-", country.lower()).strip("-")
    parsed = parse(Raw(WRITERS[ext](country, sections), f"{name}.{ext}", f".{ext}"))
    return parsed.title or name, [chunk.text for chunk in chunker.split(parsed.text, parsed.pages)]


def multi(raw: Path, evaluated: Evaluated) -> Iterator[Any]:
    """Rows (question, answer, [(title, passage, needed)])."""
    for question, answer, found in sources.two_wiki(raw / "2wikimqa_train_500.json"):
        kept = [each for each in found if not evaluated.repeats(each[1])]
        if not evaluated.asked(question) and all(each in kept for each in found if each[2]):
            yield question, answer, kept


def names(articles: list[tuple[str, str]]) -> dict[str, list[str]]:
    """First names, last names and places in titles, the most frequent first."""
    first, last, place = Counts[str](), Counts[str](), Counts[str]()
    for title, text in articles:
        parts = title.split(" ")
        person = len(parts) == 2 and all(re.fullmatch(r"[A-Z][a-z]{2,9}", part) for part in parts)
        if person and re.search(r"\((?:born )?[^()]*\d{4}", text[:120]):
            first[parts[0]] += 1
            last[parts[1]] += 1
        match = re.match(r"([A-Z][a-z]{3,10}) is an? (?:small )?(?:village|town|city)", text)
        if match:
            place[match.group(1)] += 1
    counted = {"first": first, "last": last, "place": place}
    return {kind: [name for name, _ in found.most_common(2500)] for kind, found in counted.items()}


if __name__ == "__main__":
    sys.exit(main())
