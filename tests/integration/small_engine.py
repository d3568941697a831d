"""A server with a tiny random model and tiers so small that all of them evict all the time, and the
invariants that hold at any moment.

SGLang checks its slots whenever it is idle, here also while it is busy, and ends the scheduler when one is
lost."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from ragserve.profiles.samkv import FILE_NAME, SAMKV, SamkvProfile
from sglang_ext.documents.fingerprint import model_fingerprint
from sglang_ext.wire.protocol import SystemText, document_key
from tests.integration.context_client import assert_same, document_plan, generate
from tests.integration.reference import Generated, Reference

PAGE = 2 * 2 * 2 * 16 * 16 * 4  # bytes: layers, K and V, heads, tokens, head size, float32
RECORD = 4096
HOST_PAGES = 24
SLOTS = 700
NEW = 6
SPACES = ("left", "right")
SIZES = (10, 5, 16, 17, 40, 64, 100, 33, 48)  # tokens of each document; the first is the system text
DRAW = random.Random(5)
TEXTS = [[DRAW.randrange(10, 8000) for _ in range(size)] for size in SIZES]  # the same in both namespaces
QUESTION = [DRAW.randrange(10, 8000) for _ in range(9)]
FILES = sum(RECORD + -(-size // 16) * PAGE for size in SIZES) * len(SPACES)
STRATEGIES: dict[str, tuple[str, dict[str, Any]]] = {
    "concat": ("concat", {}),
    "half": ("concat", {"keep": 0.5}),
    "all": ("concat", {"recompute": "all"}),
    "epic": ("epic", {"first": 4}),
    "random": ("random", {"share": 0.2}),
    "cacheblend": ("cacheblend", {"share": 0.3}),
}
PROFILE: dict[str, Any] = {
    "stable": [0],
    "heads": [[1, 1]],
    "selection": "shared",
    "options": {
        "shared": {
            "score_positions": "adjacent",
            "experimental": {"scoring": "raw", "question_query": "mean"},
        }
    },
}
"""The samkv profile beside the model; every option differs from the built-in one."""
Document = tuple[int, int]  # namespace, text


class Engine:
    """A server that can be stopped, killed and started again over the same folder."""

    def __init__(self, start: Any, model: Path, folder: Path) -> None:
        self._start, self.model, self.folder = start, model, folder
        self._stack = contextlib.ExitStack()
        about = {
            "model": "small",
            "hardware": "",
            "dtype": "float32",
            "date": "",
            "versions": {},
            "probes": {},
            "figures": {},
        }
        SAMKV.save(model / FILE_NAME, model_fingerprint(str(model), ""), SamkvProfile(**PROFILE, **about))
        self.reference = Reference(model)
        self.answers: dict[Any, Generated] = {}
        self.tally: Counter[str] = Counter()
        self.up()

    def up(self, sglang: Path | None = None) -> None:
        """Start the server; ``sglang``: a folder that has another version of it."""
        # The tests set narrower budgets; the disk's must hold everything when the folder is scanned after a
        # kill.
        flags = {"max_total_tokens": SLOTS, "kv_host_bytes": HOST_PAGES * PAGE, "kv_disk_bytes": 2**30}
        flags["engine_args"] = '{"chunked_prefill_size": 64}'
        strict = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_CHECK_KV_PAGE_INVARIANTS": "1"}
        flags["control_routes"] = True  # for /dumper
        env = {"DUMPER_SERVER_PORT": "reuse", **strict, **({"PYTHONPATH": str(sglang)} if sglang else {})}
        self.server = self._stack.enter_context(
            self._start(data_dir=self.folder, model=self.model, env=env, **flags)
        )
        self.client = self._stack.enter_context(self.server.client())
        self.fingerprint = self.control("info")["fingerprint"]

    @property
    def is_up(self) -> bool:
        return self.server.process.poll() is None

    def down(self) -> None:
        self._stack.close()

    def control(self, operation: str, **arguments: Any) -> dict[str, Any]:
        while True:
            answer = self.client.post("/dumper/ragserve", json={"op": operation, **arguments})
            assert answer.status_code == 200, answer.text
            found = dict(answer.json()[0])
            if "pending" not in found:
                return found
            arguments["pending"] = found["pending"]
            time.sleep(0.02)

    def scheduler(self) -> psutil.Process:
        family = psutil.Process(self.server.process.pid).children(recursive=True)
        return max(family, key=lambda process: process.memory_info().rss)

    def key(self, document: Document) -> str:
        space, text = document
        ids = TEXTS[text] if text else SystemText(TEXTS[text])
        return document_key(SPACES[space], self.fingerprint, ids)

    def file(self, document: Document) -> Path:
        return self.folder / "kv" / "rank-0-of-1" / SPACES[document[0]] / f"{self.key(document)}.pages"

    def put(self, document: Document) -> None:
        space, text = document
        answer = generate(self.client, TEXTS[text], document_plan(SPACES[space], text), n_new=1)
        assert "error" not in answer, answer

    def idle(self) -> dict[str, Any]:
        """Wait until no slot is locked and no document pinned; the figures of that moment."""
        deadline = time.monotonic() + 240
        while True:
            figures = self.control("stat")
            held = figures["device"]["locked_tokens"], figures["host"]["pinned_documents"]
            if held == (0, 0):
                return figures
            assert time.monotonic() < deadline, f"{held[0]} slots stay locked and {held[1]} documents pinned"
            time.sleep(0.02)

    def check(self) -> dict[str, Any]:
        """Check the accounts of all tiers, and every page on disk against what was stored."""
        assert self.server.process.poll() is None, self.server.log.read_text()[-4000:]
        figures = self.idle()
        self.control("check")
        assert self.control("verify")["bad"] == []
        assert figures["device"]["bytes"] <= figures["device"]["budget_bytes"]
        return figures

    def prompt(self, texts: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
        ids: list[int] = []
        spans = []
        for text in (0, *texts):
            spans.append((len(ids), len(ids) + SIZES[text]))
            ids += TEXTS[text]
        return ids + QUESTION, spans

    def right(self, strategy: str, texts: list[int], got: Generated) -> None:
        """Compare an answer with transformers, or with the first answer to the same prompt where
        transformers has no equivalent."""
        ids, spans = self.prompt(texts)
        known = (strategy, *texts)
        if known not in self.answers:
            if strategy in ("plain", "all"):
                self.answers[known] = self.reference.plain(ids, NEW)
            elif strategy == "concat":
                self.answers[known] = self.reference.composed(ids, spans, NEW)
            else:
                self.answers[known] = got
        assert_same(got, self.answers[known])

    def reset(self) -> None:
        """Empty all tiers and set the usual budgets."""
        self.control("budget", host_bytes=HOST_PAGES * PAGE, disk_bytes=FILES)
        self.control("flush")
        self.control("clear")
