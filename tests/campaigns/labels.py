"""A document with a label in the attacker's own namespace, and a key without it: probes of `tenants`.

They need a server that admits keys, one of its own: a shared one that is open to everybody has none."""

from __future__ import annotations

import json
import random
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import httpx

from ragserve.errors import NotFound
from ragserve.tenants.key_file import KeyFile
from tests.campaigns.operations import SPECS

if TYPE_CHECKING:
    from tests.campaigns.site import Site
    from tests.campaigns.tenants import Tenants

SPACE = "tenant-labels"
LABEL, SECRET = "board", "hollowtree"
SHARED = {
    f"notice {i}": f"Notice number {i} is for everybody in the house, on floor {i}. " * 6 for i in range(4)
}
LABELLED = {"minutes": f"The board has met. The word that it has chosen is {SECRET}. " * 6}
QUESTION = "Which word has the board chosen?"


class Reader:
    """A key without the label. ``waits``: waiting times so far, by case."""

    def __init__(self, site: Site, stack: ExitStack, waits: dict[str, list[float]]) -> None:
        self.site, self.waits = site, waits
        site.put(SPACE, SHARED)
        rows = [{"name": name, "text": text, "labels": [LABEL]} for name, text in LABELLED.items()]
        site.finished(site.call("POST", "/rag/ingest", json={"namespace": SPACE, "texts": rows}))
        self.hidden = site.documents(SPACE)["minutes"]
        keys = KeyFile(site.running.data_dir)
        with suppress(NotFound):  # a campaign that goes on has that of its last run
            keys.revoke("reader")
        _, secret = keys.create("reader", [SPACE], ["read", "ingest", "delete"])
        headers = {"Authorization": f"Bearer {secret}"}
        self.client = stack.enter_context(httpx.Client(base_url=site.url, headers=headers, timeout=300))

    def read(self, method: str, path: str, **options: Any) -> Any:
        """What the key gets of a request, in which nothing may be of the document."""
        answer = self.client.request(method, path, **options)
        assert SECRET not in answer.text, f"{method} {path} {options} shows the secret"
        assert answer.status_code < 500, f"{method} {path} {options}: {answer.text}"
        return answer.json()

    def ttft(self, body: dict[str, Any]) -> float:
        return float(self.read("POST", "/rag/query", json=body)["timings"]["ttft_ms"])


def labelled_search(tenants: Tenants, chance: random.Random) -> None:
    """Every search and strategy finds the others, as many as there are."""
    if (reader := tenants.reader) is None:
        return
    asked = {"namespace": SPACE, "query": QUESTION, "k": len(SHARED)}
    retrieval = chance.choice(("dense", "lexical", "hybrid"))
    found = reader.read("POST", "/rag/retrieve", json=asked | {"retrieval": retrieval})["results"]
    assert retrieval == "lexical" or len(found) == len(SHARED), f"{retrieval} finds {len(found)}"
    strategy, options = chance.choice(SPECS)
    force = {"force": True} if strategy not in ("full", "prefix", "auto") else {}
    more = {"strategy": strategy, "strategy_options": options | force, "max_new_tokens": 8}
    reader.read("POST", "/rag/query", json=asked | more)
    chat = {"model": f"ragserve/{SPACE}", "messages": [{"role": "user", "content": QUESTION}]}
    reader.read("POST", "/v1/chat/completions", json=chat | {"max_tokens": 8})


def labelled_reads(tenants: Tenants, chance: random.Random) -> None:
    """Its id leads nowhere, and no list or count has it."""
    if (reader := tenants.reader) is None:
        return
    where = {"params": {"namespace": SPACE}}
    for method, suffix in (("GET", ""), ("GET", "/chunks"), ("DELETE", "")):
        reader.read(method, f"/rag/documents/{reader.hidden}{suffix}", **where)
    reader.read("PUT", f"/rag/documents/{reader.hidden}/labels", json={"labels": []}, **where)
    assert reader.hidden in tenants.site.documents(SPACE).values()
    rows = reader.read("GET", "/rag/documents", **where)["documents"]
    assert {row["source"] for row in rows} == set(SHARED)
    assert reader.read("GET", f"/rag/namespaces/{SPACE}")["n_documents"] == len(SHARED)
    for path in ("/rag/jobs", "/rag/feedback", "/rag/unanswered", "/rag/sessions"):
        assert reader.hidden not in json.dumps(reader.read("GET", path, **where))


def labelled_waiting(tenants: Tenants, chance: random.Random) -> None:
    """Who sends the same text with a question does not learn, by a cache hit or by the time to the first
    token, that a hidden document has it."""
    if (reader := tenants.reader) is None:
        return
    texts = [{"text": text, "title": name} for name, text in LABELLED.items()]
    body = {"namespace": SPACE, "query": "Who met?", "documents": texts, "max_new_tokens": 1}
    body |= {"strategy": "prefix"}
    cases, waits = ["hidden cached", "hidden cold"], dict[str, float]()
    chance.shuffle(cases)
    for case in cases:
        tenants.empty()
        other = [{"text": text[::-1], "title": name} for name, text in LABELLED.items()]
        # a server that did nothing since its cache was emptied is slower
        before = body if case == "hidden cached" else body | {"documents": other}
        tenants.site.call("POST", "/rag/query", json=before)
        answer = reader.client.post("/rag/query", json=body).json()  # which shows the text that it was sent
        assert answer["usage"]["cached"] == 0, f"it found the hidden document's KV: {answer['usage']}"
        waits[case] = float(answer["timings"]["ttft_ms"])
    for case, wait in waits.items():
        reader.waits.setdefault(case, []).append(wait)
