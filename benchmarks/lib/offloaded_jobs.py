"""The offloaded stress (gpu_offloaded_stress.py): random requests, one of them sent, and what answers are
worth.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lib.places import REPO
from ragserve.answering.prompt import PromptBuilder
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.stream import new_rid, payload
from ragserve.errors import EngineError
from sglang_ext.wire.protocol import DECODE_FIELD, MISSING_PREFIX, DecodeReport, Span

QUESTIONS = REPO / "tests" / "data" / "questions"
POSITIONS = 8192  # of the small model
TRIES = 4  # to find all documents of a composed context in the cache
GONE = "documents were evicted meanwhile"  # ends a composed request that is retracted without them

LAGGING = {"mode": "hierarchical", "streaming": False}
PROGRESSIVE = {"mode": "progressive", "streaming": False}
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {  # weight in the mix, prompt, decode options
    "dense": (2, "short", {"mode": "dense"}),
    "resident": (4, "short", LAGGING),
    "resident, progressive": (2, "short", PROGRESSIVE),
    "offloaded": (5, "short", LAGGING | {"offloaded": True}),
    "auto": (4, "short", LAGGING | {"offloaded": "auto"}),
    "offloaded, progressive": (4, "short", PROGRESSIVE | {"offloaded": True}),
    "composed": (3, "documents", LAGGING | {"offloaded": True}),
    "composed, progressive": (2, "documents", PROGRESSIVE | {"offloaded": True}),
    "larger than the pool": (1, "long", LAGGING | {"offloaded": True}),
    "larger, auto": (1, "long", LAGGING | {"offloaded": "auto"}),
    "larger, progressive": (1, "long", PROGRESSIVE | {"offloaded": True}),
    "larger, composed": (1, "many documents", LAGGING | {"offloaded": True}),
}
FAR = 4  # times what rounding explains: another token, or other pages, were chosen
COMPARED = (  # of `offloaded_compare.summary`, in the report
    *("compared", "same tokens", "apart median", "apart worst", "apart beyond rounding"),
    *("by the same pages median", "by the same pages worst", "by the same pages beyond rounding"),
    *("on the device, again median", "on the device, again worst", "on the device, again beyond rounding"),
    *("choose", "choose otherwise", "worst of the others", "again, otherwise"),
    *("scores moved", "scores moved, again"),
)
RIVALS = ("dense", "resident", "resident, progressive")  # what is compared says how much rounding changes


@dataclass(frozen=True)
class Job:
    """One request. ``leaves_after``: seconds until its client goes, or tokens if ``by_tokens``; 0: it
    stays."""

    number: int
    kind: str
    ids: list[int]
    spans: list[list[int]]
    n_new: int
    decode: dict[str, Any]
    leaves_after: float = 0.0
    by_tokens: bool = False

    @property
    def resident(self) -> Job:
        """The same on the device, with the same lag."""
        decode = {
            key: value for key, value in self.decode.items() if key not in ("offloaded", "resident_blocks")
        }
        if decode["mode"] == "progressive":  # there only its resident blocks have a lag
            decode = {key: value for key, value in decode.items() if key not in ("lag", "reuse", "budget")}
        return Job(self.number, self.kind, self.ids, self.spans, self.n_new, decode)


@dataclass
class Answer:
    """What came of a job. ``ended``: "answered", "left", "gone" (its documents), or "failed"."""

    ended: str
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    report: DecodeReport | None = None
    retracted: int = 0
    error: str = ""
    tokens: int = 0  # by SGLang's count; it may give one log-probability less, and so fewer ``ids``

    def as_if_never_retracted(self, job: Job) -> bool:
        """Whether it must be the answer of an undisturbed request: one that was prefilled again has KV of its
        answer by all pages, where steps had it by chosen ones."""
        if self.ended != "answered" or self.report is None:
            return self.ended == "answered" and job.decode["mode"] == "dense"
        return self.report.resumed == self.retracted


class Jobs:
    """Draws jobs over texts of the small question sets, so that prompts share prefixes and documents."""

    def __init__(self, builder: PromptBuilder, pool: int, *, page: int, longest: int, answer: int) -> None:
        """``pool``: tokens of the KV pool; ``page``: of a page; ``longest``: of a prompt, more than the
        pool's; ``answer``: of an answer, at most."""
        rows = [
            json.loads(line)
            for path in sorted(QUESTIONS.glob("*.jsonl"))
            for line in path.read_text(encoding="utf-8").splitlines()
        ]
        self.texts = [tokens(builder, f"{title}: {text}\n") for row in rows for title, text in row["docs"]]
        self.questions = [tokens(builder, f"Question: {row['question']}\nAnswer:") for row in rows]
        self.pool, self.page, self.longest, self.answer = pool, page, longest, answer
        fixed = random.Random(5)
        self.streams = [self._stream(fixed, longest) for _ in range(5)]  # whose starts many prompts share
        self.documents = [self._stream(fixed, fixed.randrange(pool // 40, pool // 7)) for _ in range(16)]
        self.count = 0

    def _stream(self, chance: random.Random, length: int) -> list[int]:
        ids: list[int] = []
        while len(ids) < length:
            ids += chance.choice(self.texts)
        return ids[:length]

    def draw(self, chance: random.Random, kinds: list[str]) -> Job:
        kind = chance.choices(kinds, [KINDS[each][0] for each in kinds])[0]
        _, prompt, decode = KINDS[kind]
        ids, spans = self._prompt(chance, prompt)
        decode = decode | self._options(chance, decode)
        n_new = min(chance.randrange(8, self.answer), POSITIONS - len(ids) - 8)
        leaves = chance.random() < 0.25
        by_tokens = chance.random() < 0.5
        after = (
            (chance.randrange(1, n_new) if by_tokens else 0.005 * 400 ** chance.random()) if leaves else 0.0
        )
        self.count += 1
        return Job(self.count, kind, ids, spans, n_new, decode, after, by_tokens)

    def _prompt(self, chance: random.Random, prompt: str) -> tuple[list[int], list[list[int]]]:
        question = chance.choice(self.questions)
        if "documents" in prompt:
            wanted = chance.uniform(0.1, 0.5) * self.pool if prompt == "documents" else 1.05 * self.pool
            ids: list[int] = []
            spans: list[list[int]] = []
            for document in chance.sample(self.documents, len(self.documents)):
                if len(ids) > wanted or len(ids) + len(document) + len(question) > self.longest:
                    break
                spans.append([len(ids), len(ids) + len(document)])
                ids = ids + document
            return ids + question, spans
        if prompt == "long":
            length = chance.randrange(int(1.02 * self.pool), self.longest - len(question))
        else:
            length = int(chance.choice((20, self.page, 0.05 * self.pool, 0.2 * self.pool, 0.4 * self.pool)))
            length = max(1, length + chance.randrange(-self.page // 2, self.page))
        return chance.choice(self.streams)[:length] + question, []

    def _options(self, chance: random.Random, decode: dict[str, Any]) -> dict[str, Any]:
        offloaded = "offloaded" in decode
        choice = {"budget": self.page * chance.choice((3, 4, 8)), "reuse": chance.choice((1, 4, 8))}
        resident_blocks = {"resident_blocks": chance.choice((0, 0, 1, 2))} if offloaded else {}
        if decode["mode"] == "dense":
            return {}
        if decode["mode"] == "progressive":
            return {
                "threshold": chance.choice((0.6, 0.9, 0.98)),
                **(choice | resident_blocks if offloaded else {}),
            }
        return choice | resident_blocks | {"lag": chance.choice((1, 2, 4))}


def tokens(builder: PromptBuilder, text: str) -> list[int]:
    return list(builder.tokenizer(text, add_special_tokens=False)["input_ids"])


async def send(engine: Any, job: Job, on_miss: Callable[[], None] = lambda: None) -> Answer:
    """Send a job and read its answer; documents that its context lacks are computed, and it is sent again."""
    sampling = Sampling(job.n_new, ignore_eos=True)
    spans = [Span(a, b) for a, b in job.spans]
    strategy = "concat" if spans else "prefix"
    request = GenerateRequest("stress", job.ids, "stress", strategy, sampling, spans, {}, decode=job.decode)
    for _ in range(TRIES):
        try:
            answer = await _once(engine, job, payload(request, new_rid("stress")))
        except Exception as error:  # noqa: BLE001 - every one is an entry of the report
            return Answer("failed", error=f"{type(error).__name__}: {error}")
        if answer is not None:
            return answer
        on_miss()
        try:
            await engine.warm(request)
        except EngineError as error:
            return Answer("failed", error=f"documents: {error}")
    return Answer("gone", error="its documents do not stay cached")


async def _once(engine: Any, job: Job, fields: dict[str, Any]) -> Answer | None:
    """Return None if documents are missing."""
    deadline = time.monotonic() + job.leaves_after if job.leaves_after and not job.by_tokens else None
    out: dict[str, Any] = {}
    try:
        async with asyncio.timeout(None if deadline is None else job.leaves_after):
            async with aclosing(engine.outputs(fields | {"return_logprob": True})) as outputs:
                async for out in outputs:
                    if job.by_tokens and out["meta_info"]["completion_tokens"] >= job.leaves_after:
                        return Answer("left", retracted=out["meta_info"].get("num_retractions", 0))
    except TimeoutError:
        taken = out["meta_info"].get("num_retractions", 0) if out else 0
        return Answer("left", retracted=taken)
    if "error" in out:
        return Answer("failed", error=str(out["error"])[:400])
    meta = out["meta_info"]
    reason = meta.get("finish_reason")
    if isinstance(reason, dict) and reason.get("type") == "abort":
        message = str(reason.get("message", ""))
        if message.startswith(MISSING_PREFIX):
            return None
        return Answer("gone" if GONE in message else "failed", error=message[:400])
    pairs = meta["output_token_logprobs"]
    said = meta.get(DECODE_FIELD) or [None]
    return Answer(
        "answered",
        [token for _, token, _ in pairs],
        [logprob for logprob, _, _ in pairs],
        DecodeReport.from_json(said[-1]) if said[-1] else None,
        meta.get("num_retractions", 0),
        tokens=meta["completion_tokens"],
    )


def judge(compared: dict[str, Any], rounding: float, *, exact: bool) -> list[str]:
    """Say what rounding does not explain."""
    wrong = []
    far = rounding * FAR
    pooled: dict[bool, list[float]] = {True: [], False: []}
    for kind, found in compared.items():
        pooled[kind in RIVALS] += found["apart"]
        wrong += [f"{kind}, asked again: {text}" for text in found["failed"]]
        if found["apart"] and statistics.median(found["apart"]) > rounding:
            wrong.append(f"{kind}: answers are {statistics.median(found['apart']):.3g} apart, median")
        if exact and (worst := max(found["apart"], default=0.0)) > far:
            wrong.append(f"{kind}: an answer is {worst:.3g} apart")
    counts = {rival: sum(each > far for each in all) for rival, all in pooled.items()}
    n_offloaded, n_rivals = len(pooled[False]), len(pooled[True])
    if n_offloaded and n_rivals:
        share, rivals = counts[False] / n_offloaded, counts[True] / n_rivals
        mean = (counts[False] + counts[True]) / (n_offloaded + n_rivals)
        noise = math.sqrt(mean * (1 - mean) * (1 / n_offloaded + 1 / n_rivals))
        if share > rivals + 3 * noise + 0.01:
            wrong.append(f"{share:.1%} of offloaded answers are far apart, and {rivals:.1%} of the others")
    return wrong


def row_of(kind: str, counts: Counter[str], compared: dict[str, Any]) -> dict[str, Any]:
    return {
        "kind": kind,
        **{name: counts[name] for name in ("requests", "answered", "left", "gone", "failed", "retracted")},
        "resumed": counts["resumed"],
        "log-probability missing": counts["log-probability missing"],
        "offloaded share of steps": round(counts["offloaded_steps"] / max(1, counts["steps"]), 3),
        "segmented tokens": counts["segmented_tokens"],
        "composed on the host": counts["on the host from the start"],
        "misses": counts["misses"],
        "host reads": counts["host_reads"],
        "fills": counts["fills"],
        "loaded GB": round(counts["loaded_bytes"] / 1e9, 3),
        **{name: compared.get(name) for name in COMPARED},
    }
