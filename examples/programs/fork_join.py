"""Fork over the retrieved passages, one answer each, and join by a choice among the answers.

    ragserve ingest examples/corpus/files --namespace demo && ragserve serve &
    python examples/programs/fork_join.py --namespace demo

The forks run concurrently, and SGLang batches them. The join puts all passages into one prompt and lets the
model choose among the forks' answers by likelihood (`sgl.select`), so the result always comes from a
document."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

from ragserve.errors import RagserveError
from ragserve.programs import Rag

# isort: split
import sglang as sgl  # after ragserve.programs: this import then also works without CUDA

QUESTION = "What is the capital of Denmark?"


@sgl.function
def fork_join(s: Any, rag: Rag, question: str, k: int) -> dict[str, Any]:
    """Set variable ``choice``; return every passage's answer and the sources of the chosen one."""
    passages = rag.retrieve(question, k=k)
    forks = s.fork(len(passages))
    for fork, passage in zip(forks.states, passages, strict=True):
        rag.insert(fork, [passage])
        rag.answer(fork, question, "answer", max_tokens=24)
    answers = [rag.read(fork, "answer") for fork in forks.states]
    forks.join()
    context = rag.insert(s, passages)
    rag.choose(s, question, list(dict.fromkeys(filter(None, answers))), "choice")
    choice = rag.read(s, "choice")
    return {
        "answers": list(zip(passages, answers, strict=True)),
        "choice": choice,
        "sources": [p.source for p in context.cited(choice, question)],
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--k", type=int, default=3, help="passages, each a fork")
    options = parser.parse_args()
    api_key = os.environ.get("RAGSERVE_API_KEY")
    rag = Rag(options.url, namespace=options.namespace, api_key=api_key)
    try:
        rag.retrieve(options.question, k=1)  # report a wrong address, key or namespace in one line
    except RagserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = fork_join.run(rag, options.question, options.k, backend=rag.endpoint()).ret_value
    print(options.question)
    for passage, answer in result["answers"]:
        print(f"  {answer:<24} from {passage.source}, characters {passage.start} to {passage.end}")
    print(f"answer: {result['choice']}")
    for source in result["sources"]:
        print(f"     from {source}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
