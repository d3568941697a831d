"""The second turn of a dialogue on a CUDA machine: how soon is its first token there, with a long first turn
held and new documents behind it?

    python -m benchmarks.gpu_dialogue OUT [--held TOKENS] [--new TOKENS] [--document TOKENS] [--repeats N]
        [--strategies SPEC,SPEC] [--evicted] [--embedded]

Sides, in turns, in one engine with the shape of Llama-3.1-8B and random weights: `documents first` (no
session, the new documents in front of the held ones, then the history: nothing is found in the prefix cache),
`append` (plain SGLang's way: the first turn is found in the prefix cache, new documents and question are
prefilled), and each of the composed ``--strategies`` with the new documents on the device and on the host.
Every measurement has a dialogue of its own over the same documents, and a question that nobody has asked. OUT
gets h200-dialogue.json, with the stages of the composed first tokens.

``--evicted``: `session_on_host` is on, and in place of the side with documents on the host the session's KV
has left the device before the second turn: it comes back from the host (`turns on host`) or is gone and
composed again (`turns lost`). OUT gets h200-dialogue-evicted.json.

``--embedded``: the small model and small sizes, to try the script without a GPU.

Quality by turn is measured by `ragserve eval --mode multiturn`, the price of choosing pages by
``--observers`` of gpu_decode.py."""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.lib.fan_out import engine_args
from ragserve.bench import model_shapes
from ragserve.bench.context import breakdown
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.errors import EngineError
from ragserve.strategy_spec import StrategySpec, parse
from ragserve.verification import report
from ragserve.verification.engine_run import TIERS, TimedAnswer, first_token, in_tier, random_tokens
from sglang_ext.wire.protocol import SessionPart, Span, document_key, session_key

SYSTEM = QUESTION = 32  # tokens
ANSWER = 16
NAMESPACE = "dialogue"
NOTE = (
    "documents first: no session, new documents in front of the held ones. append: the first turn is found "
    "in the prefix cache, new documents and question are prefilled. composed: a session, with the new "
    "documents on the device or on the host. Medians. compose, ask (finding what the question attends to), "
    "recompute (with the question) and extend: work on the device; other: messages between processes, "
    "admission, launching, sampling and the way back."
)
EXACT = ("documents first", "append")
ON_HOST, LOST = "composed, turns on host", "composed, turns lost"
STRATEGIES = "concat:recompute=sentences,share=0.1,concat:recompute=sentences,share=0.05"
SHOWN = ("compose ms", "ask ms", "recompute ms", "recompute graph", "extend ms", "queue ms", "other ms")


class Dialogue:
    """Two turns: documents in front of the first question, further ones behind its answer."""

    def __init__(self, held: int, new: int, document: int, seed: int) -> None:
        draw = random.Random(seed)  # documents are the same in each dialogue
        self._system = random_tokens(draw, SYSTEM)
        self._held = [random_tokens(draw, document) for _ in range(held // document)]
        self._new = [random_tokens(draw, document) for _ in range(new // document)]
        self._draw = random.Random()
        self._n = 0

    def _prompt(
        self, parts: Sequence[Sequence[int]], tail: Sequence[int]
    ) -> tuple[list[int], tuple[Span, ...]]:
        ids: list[int] = []
        spans = []
        for part in parts:
            spans.append(Span(len(ids), len(ids) + len(part)))
            ids += part
        return ids + list(tail), tuple(spans)

    def ask(self, strategy: str, options: dict[str, Any]) -> tuple[GenerateRequest, GenerateRequest]:
        """The first turn, and the second one behind an answer that the engine is made to give."""
        self._n += 1
        first, second = (random_tokens(self._draw, QUESTION) for _ in range(2))
        answer = random_tokens(self._draw, ANSWER)
        sampling = Sampling(max_new_tokens=ANSWER, ignore_eos=True)
        ids, spans = self._prompt([self._system, *self._held], first)
        key = session_key(NAMESPACE, f"{self._n:032x}")
        one = GenerateRequest(
            "turn-1",
            ids,
            NAMESPACE,
            strategy,
            sampling,
            spans,
            options,
            forced=answer,
            session=SessionPart(key),
        )
        ids, spans = self._prompt([[*ids, *answer], *self._new], second)
        held = one.spans[-1].end
        two = replace(
            one, rid="turn-2", input_ids=ids, spans=spans, session=SessionPart(key, held), forced=()
        )
        again = replace(one, sampling=replace(sampling, max_new_tokens=1), forced=())
        return one, replace(two, sampling=replace(sampling, max_new_tokens=2), earlier=lambda: again)

    def documents_first(self) -> GenerateRequest:
        """The second turn of a server without sessions."""
        history = random_tokens(self._draw, 2 * QUESTION + ANSWER)
        ids, spans = self._prompt([self._system, *self._new, *self._held], history)
        self._n += 1
        sampling = Sampling(max_new_tokens=2, ignore_eos=True)
        return GenerateRequest("first", ids, f"{NAMESPACE}-{self._n}", "prefix", sampling, spans)


async def measure(
    engine: Any, side: str, dialogue: Dialogue, strategy: str, options: dict[str, Any]
) -> TimedAnswer:
    """Ask a second turn. Raises EngineError if what it should go on from was not where it should be."""
    if side == "documents first":
        return checked(await first_token(engine, dialogue.documents_first()), found=0)
    composed = side.startswith("composed")
    one, two = dialogue.ask(strategy, options) if composed else dialogue.ask("prefix", {})
    if not composed:
        await first_token(engine, one)
        return checked(await first_token(engine, two), found=len(one.input_ids))
    new = two.spans[1:]
    await engine.warm(one)
    await engine.warm(replace(two, session=None, spans=new))
    await first_token(engine, one)
    if side == ON_HOST:
        await engine.control("evict", tiers=["sessions"], timeout_s=120.0)
    elif side == LOST and two.session is not None:
        await engine.control("remove_session", key=two.session.key)
    elif side.endswith("host"):
        await engine.control("flush", timeout_s=120.0)
        fingerprint = (await engine.control("info"))["fingerprint"]
        documents = [two.input_ids[span.start : span.end] for span in new]
        keys = [document_key(NAMESPACE, fingerprint, ids) for ids in documents]
        await in_tier(engine, "host", keys)
    answer = await first_token(engine, two)
    tier = "device" if side in (ON_HOST, LOST) else side.rpartition(" ")[2]
    others = answer.tiers - {"session"}
    if answer.context is None or others != {tier}:
        raise EngineError(f"{side}: {answer.last.fallback or answer.context}")
    return answer


def checked(answer: TimedAnswer, found: int) -> TimedAnswer:
    """Return an exact answer that found so many tokens or more in the prefix cache, or none.

    Raises EngineError for another one."""
    cached = answer.last.usage.cached
    if cached + 128 < found or (not found and cached > 128):  # whole pages only
        raise EngineError(f"{cached} tokens were found in the prefix cache instead of {found}")
    return answer


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--held", type=int, default=32_768)
    parser.add_argument("--new", type=int, default=4096)
    parser.add_argument("--document", type=int, default=1024)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--strategies", default=STRATEGIES)
    parser.add_argument("--evicted", action="store_true")
    parser.add_argument("--embedded", action="store_true")
    given = parser.parse_args()
    if given.embedded:
        given.held, given.new, given.document, given.repeats = 1024, 256, 128, 2
    ways = (
        ["composed, device", ON_HOST, LOST] if given.evicted else [f"composed, {tier}" for tier in TIERS[:2]]
    )
    composed = [(way, spec) for spec in parse(given.strategies) for way in ways]
    sides: list[tuple[str, StrategySpec]] = [*((side, StrategySpec("prefix")) for side in EXACT), *composed]
    shape = "embedded" if given.embedded else "llama-3.1-8b"
    tokens = given.held + given.new
    room = 6 * tokens + 8192
    settings: dict[str, Any] = {
        "kv_disk_bytes": 0,
        "session_on_host": given.evicted,
        "kv_host_bytes": (4 if given.evicted else 2) * tokens * model_shapes.kv_bytes_per_token(shape),
        "max_total_tokens": room,
        "engine_args": engine_args(None) | ({} if given.embedded else {"disable_prefill_cuda_graph": True}),
    }
    rows: list[dict[str, Any]] = []
    workload: dict[str, Any] = {"model": f"{shape}, random weights", "held tokens": given.held}
    workload |= {"new document tokens": given.new, "repeats after a warm-up": given.repeats}

    async def work(engine: Any) -> None:
        workload["attention"] = engine.info.attention_backend
        dialogue = Dialogue(given.held, given.new, given.document, seed=19)
        times: list[list[TimedAnswer]] = [[] for _ in sides]
        for _ in range(given.repeats + 1):
            for own, (side, spec) in zip(times, sides, strict=True):
                own.append(await measure(engine, side, dialogue, spec.name, dict(spec.options)))
        medians = [statistics.median(each.ttft_ms for each in own[1:]) for own in times]
        for (side, spec), own, median in zip(sides, times, medians, strict=True):
            context = own[-1].context
            row = {
                "side": side,
                "strategy": spec.label,
                "first token ms": round(median, 2),
                "fastest ms": round(min(each.ttft_ms for each in own[1:]), 2),
                "slowest ms": round(max(each.ttft_ms for each in own[1:]), 2),
                "cached": own[-1].last.usage.cached,
                "held": context.session_held if context else None,
                "recomputed": context.recomputed if context else None,
            }
            for rival, ms in zip(EXACT, medians, strict=False):
                row[f"times sooner than {rival}"] = round(ms / median, 2)
            stages = breakdown(own[1:])
            rows.append(row | {name: stages.get(name) for name in SHOWN})
        await engine.control("check")

    model_shapes.run_engine(shape, work, **settings)
    given.out.mkdir(parents=True, exist_ok=True)
    name = "h200-dialogue-evicted.json" if given.evicted else "h200-dialogue.json"
    report.write("dialogue, second turn", workload, rows, out=given.out / name, note=NOTE)


if __name__ == "__main__":
    main()
