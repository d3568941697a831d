"""Lead strategies along dialogues of several turns, on an engine alone, and compare turns with full prefill.

All strategies answer with the tokens of `full`, so they go on from the same dialogue, each over the KV that
it has made of the turns before: what adds up from turn to turn shows in their distributions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ragserve.answering.prompt import Message, Prompt, PromptBuilder, PromptDocument
from ragserve.engine.base import GenerateRequest, Sampling, WarmEngine
from ragserve.errors import RagserveError
from ragserve.eval.data import GivenPassage
from ragserve.eval.multiturn import DOCUMENTS_FIRST, DialogueTurn
from ragserve.eval.run import Progress
from ragserve.measuring.distribution import Closeness, ReferenceAnswer, answer_of, forced_along
from ragserve.measuring.engine_run import TimedAnswer, first_token
from ragserve.strategy_spec import FULL, StrategySpec
from sglang_ext.protocol import EXACT_STRATEGIES, SessionPart, session_key

NAMESPACE = "eval"
NOTE = (
    "answer_kl: KL(full || strategy) in nats a token, mean over the answer of full along which the strategy "
    "is led; kl_worst: that of the worst turn. agrees: percent of the tokens with the same most likely one; "
    "as_full: percent of the turns that would be answered as by full. ttft: milliseconds, documents on the "
    "device. held, computed: tokens of earlier turns found under the session's key, and computed again. "
    "documents first: no session; all documents so far, the newest in front, then the history."
)
Line = dict[str, Any]


async def led_along(
    engine: WarmEngine,
    builder: PromptBuilder,
    dialogues: Sequence[Sequence[DialogueTurn]],
    specs: Sequence[StrategySpec],
    max_new_tokens: int,
    *,
    progress: Progress,
) -> list[Line]:
    """Return a line for each turn and strategy, `full` and the rival without sessions included. A turn that
    fails ends its dialogue with a line that says why."""
    lines: list[Line] = []
    others = [spec for spec in specs if spec.label != FULL.label]
    for number, dialogue in enumerate(dialogues):
        talk = _Talk(engine, builder, others, f"{number:032x}", max_new_tokens)
        for place, turn in enumerate(dialogue, 1):
            head = {"id": turn.question.id, "turn": place, "place": turn.place}
            try:
                lines += [head | line | {"error": None} for line in await talk.turn(turn)]
            except RagserveError as error:
                lines.append(head | {"strategy": FULL.label, "error": f"{error.code}: {error.message}"})
                break
            finally:
                progress()
    return lines


class _Talk:
    """One dialogue, in a session of each strategy."""

    def __init__(
        self,
        engine: WarmEngine,
        builder: PromptBuilder,
        specs: Sequence[StrategySpec],
        name: str,
        max_new_tokens: int,
    ) -> None:
        self._engine, self._builder, self._specs = engine, builder, specs
        self._sampling = Sampling(max_new_tokens=max_new_tokens)
        self._room = engine.info.max_prompt_tokens - max_new_tokens
        self._name = name
        self._ids: list[int] = []
        self._history: list[Message] = []
        self._documents: list[PromptDocument] = []
        self._held = 0
        self._composed: dict[str, GenerateRequest] = {}  # the last turn with documents, by strategy

    async def turn(self, turn: DialogueTurn) -> list[Line]:
        """Ask under `full`, lead every other strategy along its answer, and go on from that."""
        asked, new = turn.question.question, _laid_out(turn.documents)
        if self._ids:
            prompt = self._builder.follow_up(self._ids, asked, new, max_prompt_tokens=self._room)
        else:
            prompt = self._builder.build(asked, new, max_prompt_tokens=self._room)
        request = self._request(prompt, FULL)
        reference = await answer_of(self._engine, request)
        same = Closeness((0.0,) * len(reference.ids), (True,) * len(reference.ids))
        lines = [self._line(FULL.label, prompt, reference.timed, same)]
        lines += [await self._along(spec, prompt, reference) for spec in self._specs]
        self._documents = [*new, *self._documents]
        first = self._builder.build(
            asked, self._documents, max_prompt_tokens=self._room, history=self._history
        )
        rival = await first_token(self._engine, self._request(first, StrategySpec("prefix")))
        lines.append(self._line(DOCUMENTS_FIRST, first, rival, None))
        text = reference.timed.text
        if not self._ids or len(prompt.spans) > 1:
            self._held = prompt.spans[-1].end
        self._ids = [*prompt.input_ids, *self._builder.answer_ids(reference.ids, text)]
        self._history += [Message("user", asked), Message("assistant", text.strip())]
        return lines

    async def _along(self, spec: StrategySpec, prompt: Prompt, reference: ReferenceAnswer) -> Line:
        key = session_key(NAMESPACE, f"{self._name}-{spec.label}")
        before = self._composed.get(spec.label)
        request = replace(
            self._request(prompt, spec),
            session=SessionPart(key, self._held),
            earlier=None if before is None else lambda: replace(before, sampling=Sampling(max_new_tokens=1)),
        )
        if spec.name not in EXACT_STRATEGIES:
            documents = prompt.spans if before is None else prompt.spans[1:]
            await self._engine.warm(replace(request, spans=documents))
        close, timed = await forced_along(self._engine, request, reference)
        if before is None or len(prompt.spans) > 1:
            self._composed[spec.label] = request
        return self._line(spec.label, prompt, timed, close)

    def _request(self, prompt: Prompt, spec: StrategySpec) -> GenerateRequest:
        sampling = replace(self._sampling, stop=prompt.stop)
        return GenerateRequest(
            "multiturn", prompt.input_ids, NAMESPACE, spec.name, sampling, prompt.spans, spec.options
        )

    def _line(self, label: str, prompt: Prompt, timed: TimedAnswer, close: Closeness | None) -> Line:
        dialogue = prompt.spans[0].end if self._ids else 0
        report, cached = timed.context, timed.last.usage.cached
        held = report.session_held if report else min(cached, dialogue)
        in_session = label not in (FULL.label, DOCUMENTS_FIRST)
        return {
            "strategy": label,
            "answer_kl": None if close is None else close.mean_kl,
            "agrees": None if close is None else close.agreement,
            "as_full": None if close is None else close.same_answer,
            "ttft_ms": round(timed.ttft_ms, 3),
            "prompt_tokens": len(prompt.input_ids),
            "held": held if in_session else 0,
            "computed": dialogue - held if in_session else 0,
            "recomputed": report.recomputed if report else 0,
            "fallback": timed.last.fallback,
        }


def by_turn(lines: Sequence[Line]) -> list[Line]:
    """Average the lines of each strategy and turn, strategies in order of first appearance."""
    found: list[Line] = []
    answered = [line for line in lines if not line["error"]]
    for label in dict.fromkeys(line["strategy"] for line in answered):
        for turn in sorted({line["turn"] for line in answered}):
            own = [line for line in answered if (line["strategy"], line["turn"]) == (label, turn)]
            if not own:
                continue
            kls = [line["answer_kl"] for line in own if line["answer_kl"] is not None]
            found.append(
                {
                    "strategy": label,
                    "turn": turn,
                    "n": len(own),
                    "answer_kl": float(f"{_mean(kls):.3g}") if kls else None,
                    "kl_worst": float(f"{max(kls):.3g}") if kls else None,
                    **{name: _percent([line[name] for line in own]) for name in ("agrees", "as_full")},
                    **{
                        name: round(_mean([line[name] for line in own]), 1)
                        for name in ("ttft_ms", "prompt_tokens", "held", "computed", "recomputed")
                    },
                    "fallbacks": sum(line["fallback"] is not None for line in own),
                }
            )
    return found


def _laid_out(documents: Sequence[GivenPassage]) -> list[PromptDocument]:
    return [PromptDocument("", each.title, each.text) for each in documents]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(100 * _mean(known), 2) if known else None
