"""Namespaces whose passages were cut by the tokens of another model than the one that reads them."""

from __future__ import annotations

from ragserve.ingest.tokenizer import Counter, TokenizerSource
from ragserve_index import IndexStore

_DOCUMENTS, _CHUNKS = 4, 2  # looked at in a namespace: one that is counted otherwise is enough


def foreign_cuts(store: IndexStore, tokenizer: str) -> list[str]:
    """Names of namespaces with passages that have another number of tokens by ``tokenizer``, a folder or a
    Hugging Face id, than they were cut by. Raises InvalidRequest where it cannot be loaded."""
    spaces = [info.name for info in store.namespaces() if info.n_documents]
    if not spaces:
        return []
    counter = Counter(TokenizerSource.load(tokenizer))
    found = []
    for name in spaces:
        documents = store.documents(name, limit=_DOCUMENTS)
        chunks = [c for one in documents for c in store.document_chunks(name, one.doc_id)[:_CHUNKS]]
        if counter.counts([chunk.text for chunk in chunks]) != [chunk.n_tokens for chunk in chunks]:
            found.append(name)
    return found


def advice_of(names: list[str], model: str) -> tuple[str, str]:
    """What to say of ``names``, and what can be done."""
    return (
        f"passages of {', '.join(names)} were cut by the tokens of another model than {model}",
        f"They are read as they are. Ingest them again with --model {model} to have them cut anew.",
    )
