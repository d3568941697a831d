"""Lead strategies along dialogues of several turns, on an engine alone, and compare turns with full prefill.

All strategies answer with the tokens of `full`, so they go on from the same dialogue, each over the KV that
it has made of the turns before: what adds up from turn to turn shows in their distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ragserve.answering.prompt import Message, Prompt, PromptBuilder, PromptDocument
from ragserve.answering.results import EarlierTurn, RetrievedPassage
from ragserve.answering.sessions.past_turns import PastTurn, SessionKv, ids_of
from ragserve.answering.sessions.turn_attention import TurnAttention
from ragserve.answering.sessions.turn_compression import TurnCompressor
from ragserve.engine.base import GenerateRequest, Sampling, WarmEngine
from ragserve.errors import RagserveError
from ragserve.eval.data import GivenPassage
from ragserve.eval.multiturn import DOCUMENTS_FIRST, DialogueTurn, refreshed_label, within_label
from ragserve.eval.page_rivals import page_rivals
from ragserve.eval.run import Progress
from ragserve.strategy_spec import FULL, StrategySpec
from ragserve.verification.distribution import Closeness, ReferenceAnswer, answer_of, forced_along
from ragserve.verification.engine_run import TimedAnswer, first_token
from ragserve.verification.metrics import contains_answer, token_f1
from sglang_ext.wire.protocol import EXACT_STRATEGIES, session_key

NAMESPACE = "eval"
NOTE = (
    "answer_kl: KL(full || strategy) in nats a token, mean over the answer of full along which the strategy "
    "is led; kl_worst: that of the worst turn. agrees: percent of the tokens with the same most likely one; "
    "as_full: percent of the turns that would be answered as by full; f1: of what would be answered; "
    "in_prompt: percent of the turns whose prompt has an answer's words. ttft: "
    "milliseconds, documents on the device. held, computed: tokens of earlier turns found under the "
    "session's key, and computed again. earlier in N: turns before the last one compressed to N tokens, by "
    "words and attention, or by words alone; compared with full over all of them. kept: tokens left of each "
    "of these turns. signals: tokens of their sentences by the signal that speaks most for each. attended: "
    "percent of these turns whose sentences were scored by attention. prefix, N by: decode steps read N "
    "tokens in each KV head, of pages "
    "chosen as named; read: percent of the context's pages. anew every N: every N turns the whole dialogue "
    "before the new documents is prefilled exactly, and turns go on from that. "
    "failed: turns without an answer, which count as 0 in f1 and as_full, and in no other mean; a turn "
    "that full fails has failed for all, and is the last of its dialogue. "
    "documents first: no session; all documents so far, the newest in front, then the history."
)
Line = dict[str, Any]
_EXACT = StrategySpec("prefix")


async def led_along(
    engine: WarmEngine,
    builder: PromptBuilder,
    dialogues: Sequence[Sequence[DialogueTurn]],
    specs: Sequence[StrategySpec],
    max_new_tokens: int,
    *,
    budget: int | None = None,
    session_budgets: Sequence[int] = (),
    refresh_turns: Sequence[int] = (),
    first: int = 0,
    progress: Progress,
) -> list[Line]:
    """Return a line for each turn and strategy, `full` and the rival without sessions included. The line of
    one that failed says why, and the others go on. Where `full` failed nothing can be compared: the turn has
    failed for all, and ends its dialogue.

    ``budget``: with sparse decoding, whose default must be dense; see `page_rivals`. ``session_budgets``: for
    each, every strategy but `full` also answers over so many tokens of the turns before the last one.
    ``refresh_turns``: for each, every composed strategy also begins from exact KV of the whole dialogue every
    so many turns. ``first``: the number of the first dialogue; the engine must not have had it."""
    lines: list[Line] = []
    others = [_Side(spec.label, spec) for spec in specs if spec.label != FULL.label]
    others += [
        replace(
            side,
            label=within_label(side.label, tokens, by_words=by_words),
            session_budget=tokens,
            by_words=by_words,
        )
        for side in others
        for tokens in session_budgets
        for by_words in (False, True)
    ]
    others += [
        replace(side, label=refreshed_label(side.label, turns), refresh=turns)
        for side in others
        if side.spec.name not in EXACT_STRATEGIES and not side.session_budget
        for turns in refresh_turns
    ]
    others += [_Side(label, _EXACT, decode) for label, decode in page_rivals(budget).items()]
    for number, dialogue in enumerate(dialogues, first):
        talk = _Talk(engine, builder, others, f"{number:032x}", max_new_tokens)
        for place, turn in enumerate(dialogue, 1):
            head = {"id": turn.question.id, "turn": place, "place": turn.place}
            own = await talk.turn(turn)
            lines += [head | line for line in own]
            progress()
            if own[0]["error"]:
                break
    return lines


@dataclass(frozen=True, slots=True)
class _Side:
    """A strategy, how it decodes if not densely, the most tokens of the turns before the last one, and
    whether words alone choose these. ``refresh``: turns after which the dialogue is prefilled anew; 0:
    never."""

    label: str
    spec: StrategySpec
    decode: Mapping[str, Any] = field(default_factory=dict)
    session_budget: int = 0
    by_words: bool = False
    refresh: int = 0

    def exact(self, turn: int) -> int:
        """Of the turns before one, counted from 0, the first ones whose KV is exact."""
        return turn // self.refresh * self.refresh if self.refresh else 0


class _Talk:
    """One dialogue, in a session of each side."""

    def __init__(
        self,
        engine: WarmEngine,
        builder: PromptBuilder,
        sides: Sequence[_Side],
        name: str,
        max_new_tokens: int,
    ) -> None:
        self._engine, self._builder, self._sides = engine, builder, sides
        self._sampling = Sampling(max_new_tokens=max_new_tokens)
        self._room = engine.info.max_prompt_tokens - max_new_tokens
        self._name = name
        self._answers: Sequence[str] = ()
        self._past: list[PastTurn] = []
        self._prompts: dict[str, list[tuple[PastTurn, ...]]] = {side.label: [] for side in sides}
        self._compressor = TurnCompressor(builder, TurnAttention(engine, builder))
        self._pasts: dict[str, tuple[PastTurn, ...]] = {}  # as the sides' prompts of this turn have it
        self._history: list[Message] = []
        self._documents: list[PromptDocument] = []

    async def turn(self, turn: DialogueTurn) -> list[Line]:
        """Ask under `full`, lead every other strategy along its answer, and go on from that. Lines of all
        strategies, that of `full` first."""
        asked, new = turn.question.question, _laid_out(turn.documents)
        self._answers = turn.question.answers
        try:
            prompt = self._prompt(self._past, asked, new)
            reference = await answer_of(self._engine, self._request(prompt, FULL))
        except RagserveError as error:
            labels = (FULL.label, *(side.label for side in self._sides), DOCUMENTS_FIRST)
            return [_failed(label, error) for label in labels]
        same = Closeness.none(len(reference.ids))
        lines = [self._line(FULL.label, prompt, reference.timed, reference.timed.text, same)]
        for side in self._sides:
            self._pasts[side.label] = tuple(self._past)
            try:
                lines.append(await self._along(side, asked, new, reference))
            except RagserveError as error:
                lines.append(_failed(side.label, error))
        self._documents = [*new, *self._documents]
        try:
            lines.append(await self._first(asked))
        except RagserveError as error:
            lines.append(_failed(DOCUMENTS_FIRST, error))
        text = reference.timed.text
        answer = self._builder.answer_ids(reference.ids, text)
        behind = len(ids_of(self._past))
        self._past.append(answered_turn(prompt, answer, asked, turn.documents, behind=behind))
        for label, past in self._pasts.items():
            self._prompts[label].append((*past, self._past[-1]))
        self._history += [Message("user", asked), Message("assistant", text.strip())]
        return lines

    async def _first(self, asked: str) -> Line:
        """The rival without sessions."""
        prompt = self._builder.build(
            asked, self._documents, max_prompt_tokens=self._room, history=self._history
        )
        rival = await first_token(self._engine, self._request(prompt, _EXACT))
        return self._line(DOCUMENTS_FIRST, prompt, rival, rival.text, None)

    async def _along(
        self, side: _Side, asked: str, new: Sequence[PromptDocument], reference: ReferenceAnswer
    ) -> Line:
        exact = side.exact(len(self._past))
        key = session_key(NAMESPACE, f"{self._name}-{side.label}" + (f"-{exact}" if exact else ""))
        past, earlier = await self._shortened(side, asked, key)
        self._pasts[side.label] = past
        prompt = self._prompt(past, asked, new)
        kv = SessionKv(past, key, exact=exact)
        request = kv.request(replace(self._request(prompt, side.spec), decode=side.decode))
        if side.spec.name not in EXACT_STRATEGIES:
            documents = prompt.spans[1:] if past else prompt.spans
            await self._engine.warm(replace(request, spans=documents))
        close, timed = await forced_along(self._engine, request, reference)
        text = reference.timed.text
        if not close.same_answer:  # its own; the next turn goes on from the other one all the same
            text = (await first_token(self._engine, request)).text
        return self._line(side.label, prompt, timed, text, close) | kept_of(earlier)

    async def _shortened(
        self, side: _Side, asked: str, key: str
    ) -> tuple[tuple[PastTurn, ...], list[EarlierTurn]]:
        """The dialogue as a side's next prompt has it, and what is left of its turns before the last one."""
        past = tuple(self._past)
        if not (past and side.session_budget):
            return past, []
        candidates = None
        if not side.by_words:
            prompts = self._prompts[side.label]
            candidates = await self._compressor.attended(past, asked, (), key, prompts)
        found = self._compressor.shorten(past, asked, side.session_budget, candidates=candidates)
        return found.turns, found.report[:-1]

    def _prompt(self, past: Sequence[PastTurn], asked: str, documents: Sequence[PromptDocument]) -> Prompt:
        if not past:
            return self._builder.build(asked, documents, max_prompt_tokens=self._room)
        return self._builder.follow_up(ids_of(past), asked, documents, max_prompt_tokens=self._room)

    def _request(self, prompt: Prompt, spec: StrategySpec) -> GenerateRequest:
        sampling = replace(self._sampling, stop=prompt.stop)
        return GenerateRequest(
            "multiturn", prompt.input_ids, NAMESPACE, spec.name, sampling, prompt.spans, spec.options
        )

    def _line(
        self, label: str, prompt: Prompt, timed: TimedAnswer, text: str, close: Closeness | None
    ) -> Line:
        dialogue = prompt.spans[0].end if self._past else 0
        report, cached = timed.context, timed.last.usage.cached
        held = report.session_held if report else min(cached, dialogue)
        in_session = label not in (FULL.label, DOCUMENTS_FIRST)
        read = timed.last.decode
        return {
            "strategy": label,
            "answer_kl": None if close is None else close.mean_kl,
            "agrees": None if close is None else close.agreement,
            "as_full": None if close is None else close.same_answer,
            "f1": token_f1(text, self._answers),
            "in_prompt": contains_answer(self._builder.words(prompt.input_ids), self._answers),
            "ttft_ms": round(timed.ttft_ms, 3),
            "prompt_tokens": len(prompt.input_ids),
            "held": held if in_session else 0,
            "computed": dialogue - held if in_session else 0,
            "recomputed": report.recomputed if report else 0,
            "read": 1.0 if read is None else read.share,
            "fallback": timed.last.fallback,
            "error": None,
        }


def _failed(label: str, error: RagserveError) -> Line:
    """The line of a strategy that did not answer a turn."""
    failure = f"{error.code}: {error.message}"
    as_full = None if label == DOCUMENTS_FIRST else False
    return {"strategy": label, "as_full": as_full, "f1": 0.0, "error": failure}


def answered_turn(
    prompt: Prompt,
    answer: Sequence[int],
    asked: str,
    documents: Sequence[GivenPassage],
    *,
    behind: int,
) -> PastTurn:
    """The turn of a prompt whose question brought ``documents``; ``answer`` and ``behind`` as in
    `PastTurn.of`."""
    passages = tuple(
        RetrievedPassage(index=number, title=each.title, text=each.text)
        for number, each in enumerate(documents[: prompt.documents_kept], 1)
    )
    return replace(PastTurn.of(prompt, answer, behind=behind), passages=passages, question=asked)


def kept_of(earlier: Sequence[EarlierTurn]) -> Line:
    """The figures of a compressed prompt's turns before the last one; nothing without any."""
    if not earlier:
        return {}
    signals: dict[str, int] = {}
    for turn in earlier:
        for name, tokens in (turn.tokens_by_signal or {}).items():
            signals[name] = signals.get(name, 0) + tokens
    chosen = [turn.rule for turn in earlier if turn.rule is not None]
    return {
        "kept": [turn.tokens_kept for turn in earlier],
        "signals": signals,
        "attended": [rule == "attention" for rule in chosen],
    }


def by_turn(lines: Sequence[Line]) -> list[Line]:
    """Average the lines of each strategy and turn, strategies in order of first appearance. Failed ones count
    as 0 in ``f1`` and ``as_full``, and in no other mean."""
    found: list[Line] = []
    for label in dict.fromkeys(line["strategy"] for line in lines):
        for turn in sorted({line["turn"] for line in lines}):
            own = [line for line in lines if (line["strategy"], line["turn"]) == (label, turn)]
            if not own:
                continue
            answered = [line for line in own if not line["error"]]
            kls = [line["answer_kl"] for line in answered if line["answer_kl"] is not None]
            found.append(
                {
                    "strategy": label,
                    "turn": turn,
                    "n": len(own),
                    "failed": len(own) - len(answered),
                    "answer_kl": float(f"{_mean(kls):.3g}") if kls else None,
                    "kl_worst": float(f"{max(kls):.3g}") if kls else None,
                    "agrees": _percent([line["agrees"] for line in answered]),
                    **{name: _percent([line[name] for line in own]) for name in ("as_full", "f1")},
                    **{name: _percent([line[name] for line in answered]) for name in ("in_prompt", "read")},
                    **{
                        name: round(_mean([line[name] for line in answered]), 1) if answered else None
                        for name in ("ttft_ms", "prompt_tokens", "held", "computed", "recomputed")
                    },
                    "fallbacks": sum(line["fallback"] is not None for line in answered),
                    **earlier_of([line for line in answered if "kept" in line]),
                }
            )
    return found


def earlier_of(lines: Sequence[Line]) -> Line:
    """Means of `kept_of`, written out; "" where nothing was compressed."""
    if not lines:
        return {"kept": "", "signals": "", "attended": None}
    kept = [_mean(column) for column in zip(*(line["kept"] for line in lines), strict=True)]
    names = sorted({name for line in lines for name in line["signals"]})
    signals = {name: _mean([line["signals"].get(name, 0) for line in lines]) for name in names}
    return {
        "kept": " + ".join(f"{tokens:.0f}" for tokens in kept),
        "signals": ", ".join(f"{name} {tokens:.0f}" for name, tokens in signals.items()),
        "attended": _percent([flag for line in lines for flag in line["attended"]]),
    }


def _laid_out(documents: Sequence[GivenPassage]) -> list[PromptDocument]:
    return [PromptDocument("", each.title, each.text) for each in documents]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _percent(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(100 * _mean(known), 2) if known else None
