"""Ask the 200 plain questions of examples/corpus/questions.jsonl, as written and as people type them.

    python -m benchmarks.plain_questions [--url URL --namespace NAME] [--out FILE] [--limit N]
        [--form NAME ...] [--spelling on,search,off]

Without ``--url`` it ingests examples/corpus and starts a server. Every question goes to /rag/query with five
retrieved passages and ordinary prefill (strategy ``full``), greedily, in four forms: plain, lower case
without the question mark, capitals, one typing error. An answer is right if it contains an accepted answer as
whole words; exact match and F1 are SQuAD's. ``retrieved`` is the share of questions for which a passage
contains an accepted answer, ``corrected`` that of questions in which a word was replaced. The report is
written anew after each row."""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.lib.places import CORPUS, REPO, RESULTS
from benchmarks.model_recipe.question_forms import capitals, lower, no_mark, typo
from examples.demo import NAMESPACE, ingest
from ragserve.engine.running_server import running_server
from ragserve.errors import RagserveError
from ragserve.verification.metrics import contains_answer, exact_match, token_f1
from ragserve.verification.report import write

QUESTIONS = CORPUS / "questions.jsonl"
OUT = RESULTS / "plain-questions.json"
PASSAGES = 5
ANSWER_TOKENS = 32
NOTE = (
    "Right: the answer contains an accepted answer as whole words. "
    "EM, F1: best over the accepted answers. Percent."
)


def one_typo(question: str) -> str:
    """The question with one typing error, the same in every run."""
    return typo(question, random.Random(question))


FORMS: dict[str, Callable[[str], str]] = {
    "plain": str,
    "lower case, no question mark": lambda question: no_mark(lower(question)),
    "capitals": capitals,
    "one typing error": one_typo,
}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a running server; default: start one")
    parser.add_argument("--namespace", default=NAMESPACE, help="where the corpus is, with --url")
    parser.add_argument("--data-dir", type=Path, default=REPO / "ragserve-data", help="folder of the index")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--limit", type=int, default=None, help="ask the first N questions only")
    parser.add_argument("--form", choices=FORMS, action="append", help="ask in this form only; repeatable")
    parser.add_argument("--spelling", default="on", help="values of the request's field, each a row")
    options = parser.parse_args()
    lines = QUESTIONS.read_text(encoding="utf-8").splitlines()[: options.limit]
    questions = [json.loads(line) for line in lines]
    try:
        with client_of(options) as client:
            workload = {
                "model": Path(str(client.get("/info").json()["model"])).name,
                "corpus": "examples/corpus",
                "questions": len(questions),
                "passages": PASSAGES,
                "strategy": "full",
                "max_new_tokens": ANSWER_TOKENS,
            }
            rows: list[dict[str, Any]] = []
            for name in options.form or FORMS:
                for spelling in options.spelling.split(","):
                    rows.append(measured(client, options.namespace, name, spelling, questions))
                    write("plain-questions", workload, rows, out=options.out, note=NOTE)
    except (RagserveError, httpx.HTTPError) as error:
        print(f"The questions could not be asked: {error}", file=sys.stderr)
        return 1
    return 0


@contextlib.contextmanager
def client_of(options: argparse.Namespace) -> Iterator[httpx.Client]:
    """A client of the server given by ``--url``, or of one started over the freshly ingested corpus."""
    if options.url:
        with httpx.Client(base_url=options.url, timeout=300) as client:
            yield client
        return
    ingest(options.data_dir)
    with running_server(data_dir=options.data_dir) as server, server.client() as client:
        yield client


def measured(
    client: httpx.Client,
    namespace: str,
    name: str,
    spelling: str,
    questions: list[dict[str, Any]],
) -> dict[str, Any]:
    """Ask all questions in one form and return the row of the report."""
    form = FORMS[name]
    scores = [asked(client, namespace, form(row["question"]), row["answers"], spelling) for row in questions]
    shares = {key: round(100 * sum(score[key] for score in scores) / len(scores), 1) for key in scores[0]}
    return {"form": name, "spelling": spelling, "n": len(scores), **shares}


def asked(
    client: httpx.Client, namespace: str, question: str, answers: list[str], spelling: str
) -> dict[str, float]:
    where = {"query": question, "namespace": namespace, "k": PASSAGES, "spelling": spelling}
    how = {"strategy": "full", "max_new_tokens": ANSWER_TOKENS}
    headers = {"Cache-Control": "no-store"}  # nobody's question: not for the server's query log
    reply = client.post("/rag/query", json={**where, **how}, headers=headers).raise_for_status().json()
    found = client.post("/rag/retrieve", json=where).raise_for_status().json()
    answer = reply["answer"].strip()
    return {
        "right": float(contains_answer(answer, answers)),
        "em": exact_match(answer, answers),
        "f1": token_f1(answer, answers),
        "retrieved": float(any(contains_answer(hit["text"], answers) for hit in found["results"])),
        "corrected": float(bool((reply["searched_for"] or {}).get("corrections"))),
    }


if __name__ == "__main__":
    sys.exit(main())
