"""Answer a question that no single document answers: split it, and retrieve for each part in turn.

    ragserve ingest examples/corpus/files --namespace demo && ragserve serve &
    python examples/programs/multi_hop.py --namespace demo

"Who is the head of state of the country that ruled Iceland before independence?" becomes "Which country ruled
Iceland before independence?" and "Who is the head of state of {its answer}?". The split follows the relative
clause, so it costs no model call and works with a model as small as the demo's; a large model could be asked
to split instead."""

from __future__ import annotations

import argparse
import os
import re
import sys
from typing import Any

from ragserve.errors import RagserveError
from ragserve.programs import Rag

# isort: split
import sglang as sgl  # after ragserve.programs: this import then also works without CUDA

QUESTION = "Who is the head of state of the country that ruled Iceland before independence?"
_CLAUSE = re.compile(
    r"^(?P<outer>.+?)\bthe (?P<noun>\w+) (?P<link>that|which|who|whose) (?P<clause>.+?)\?*$", re.IGNORECASE
)


def decompose(question: str) -> list[str]:
    """Split a question into single-hop questions, in order; ``{}`` stands for the previous answer.

    A question without a relative clause is unchanged; nested clauses are split from the inside out."""
    found = _CLAUSE.match(question.strip())
    if found is None:
        return [question.strip()]
    noun, link = found["noun"], found["link"].lower()
    clause = f"{noun}'s {found['clause']}" if link == "whose" else f"{noun} {found['clause']}"
    return [*decompose(f"Which {clause}?"), f"{found['outer']}{{}}?"]


@sgl.function
def multi_hop(s: Any, rag: Rag, question: str, k: int) -> list[dict[str, Any]]:
    """Set variables ``hop_1``, ``hop_2``, ...; return question, sources and answer of each hop."""
    hops: list[dict[str, Any]] = []
    for number, template in enumerate(decompose(question), 1):
        asked = template.format(hops[-1]["answer"] if hops else "")
        # Each hop is a separate prompt, because documents come before any answer.
        with s.copy() as hop:
            context = rag.context(hop, asked, k=k)
            rag.answer(hop, asked, f"hop_{number}", max_tokens=24)
            answer = rag.read(hop, f"hop_{number}")
        hops.append(
            {"question": asked, "answer": answer, "sources": [p.source for p in context.cited(answer, asked)]}
        )
    return hops


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--k", type=int, default=3, help="passages for each hop")
    options = parser.parse_args()
    api_key = os.environ.get("RAGSERVE_API_KEY")
    rag = Rag(options.url, namespace=options.namespace, api_key=api_key)
    try:
        rag.retrieve(options.question, k=1)  # report a wrong address, key or namespace in one line
    except RagserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    state = multi_hop.run(rag, options.question, options.k, backend=rag.endpoint())
    for hop in state.ret_value:
        print(f"{hop['question']}\n  -> {hop['answer']}")
        for source in hop["sources"]:
            print(f"     from {source}")
    print(f"answer: {state.ret_value[-1]['answer']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
