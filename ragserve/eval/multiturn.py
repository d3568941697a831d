"""Ask a running server dialogues of several turns, as sessions and with all documents in front.

A dialogue is made of consecutive questions of a set. In half of the dialogues a turn brings the documents of
its own question, in the other half those of a later one: its answer stands in documents of an earlier turn.
Scores and first tokens are reported by turn, so that what adds up from turn to turn can be seen."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal

from ragserve.client import Client, ContextDocument, Turn
from ragserve.errors import InvalidRequest, RagserveError
from ragserve.eval.data import GivenPassage, Question
from ragserve.eval.run import AnswerOutcome, Options, Progress, failed, outcome_of, summary
from ragserve.strategy_spec import FULL

NOTE = (
    "em, f1: percent, SQuAD's normalisation. as_full: percent of the turns with the answer of full. here, "
    "earlier: f1 where the turn, or an earlier one, brought the documents. held, computed: tokens of earlier "
    "turns found under the session's key, and computed again, mean. earlier in N: turns before the last "
    "one compressed to N tokens. documents first: no session; all "
    "documents so far, the newest in front, then the history."
)
DOCUMENTS_FIRST = "prefix, documents first"


def within_label(label: str, tokens: int, *, by_words: bool = False) -> str:
    """The name of a strategy whose turns before the last one are compressed to so many tokens."""
    return f"{label}, earlier in {tokens}{' by words' if by_words else ''}"


def refreshed_label(label: str, turns: int) -> str:
    """The name of a strategy whose dialogue is prefilled anew every so many turns."""
    return f"{label}, anew every {turns}"


@dataclass(frozen=True, slots=True)
class DialogueTurn:
    """A question, and the documents that come with it. ``place``: whether they are its own; ``unknown`` where
    the set does not say which are."""

    question: Question
    documents: tuple[GivenPassage, ...]
    place: Literal["here", "earlier", "unknown"]


@dataclass(frozen=True, slots=True)
class TurnOutcome:
    """The answer of a turn, numbered from 1; tokens of earlier turns that were held, and computed again."""

    number: int
    turn: DialogueTurn
    answer: AnswerOutcome
    held: int = 0
    computed: int = 0

    def record(self) -> dict[str, Any]:
        """Convert to a line of the per-question file."""
        figures = {
            "turn": self.number,
            "place": self.turn.place,
            "held": self.held,
            "computed": self.computed,
        }
        return figures | self.answer.record()


def shortened_runs(runs: Sequence[Options], budgets: Sequence[int]) -> list[Options]:
    """Each of the runs but `full` with each of the budgets of a session's turns before the last one."""
    return [
        replace(options, name=within_label(str(options.label), tokens), session_budget=tokens)
        for options in runs
        if options.label != FULL.label
        for tokens in budgets
    ]


def dialogues_of(questions: Sequence[Question], turns: int, ahead: int = 1) -> list[list[DialogueTurn]]:
    """Make dialogues of ``turns`` questions each; questions that make no whole one are left out.
    ``ahead``: as in `alternating`.

    Raises InvalidRequest if there are too few for one of each kind."""
    groups = [questions[at : at + turns] for at in range(0, len(questions) - turns + 1, turns)]
    if len(groups) < 2:
        raise InvalidRequest(
            f"{len(questions)} questions make fewer than two dialogues of {turns} turns.",
            hint="Give a larger set, or a smaller --turns.",
        )
    return alternating(groups, ahead)


def alternating(groups: Sequence[Sequence[Question]], ahead: int = 1) -> list[list[DialogueTurn]]:
    """Make a dialogue of each group: documents come with their own question, or ``ahead`` turns before it."""
    return [
        brought_ahead(group, ahead) if number % 2 else _here(group) for number, group in enumerate(groups)
    ]


def _here(group: Sequence[Question]) -> list[DialogueTurn]:
    return [DialogueTurn(question, question.documents, "here") for question in group]


def brought_ahead(group: Sequence[Question], turns: int) -> list[DialogueTurn]:
    """A dialogue of these questions: turn t brings the documents of question t + ``turns``, the first turn
    those of all before as well."""
    first = tuple(document for question in group[: turns + 1] for document in question.documents)
    brought = [first, *(question.documents for question in group[turns + 1 :])]
    brought += [()] * (len(group) - len(brought))
    return [
        DialogueTurn(question, documents, "earlier" if number else "here")
        for number, (question, documents) in enumerate(zip(group, brought, strict=True))
    ]


def ask_dialogues(
    client: Client,
    dialogues: Sequence[Sequence[DialogueTurn]],
    options: Options,
    *,
    documents_first: bool = False,
    progress: Progress,
) -> list[TurnOutcome]:
    """Ask all turns of all dialogues, ``options.concurrency`` dialogues at a time."""

    def ask(dialogue: Sequence[DialogueTurn]) -> list[TurnOutcome]:
        asked = _with_history if documents_first else _in_session
        outcomes = list(asked(client, dialogue, options))
        for _ in outcomes:
            progress()
        return outcomes

    with ThreadPoolExecutor(options.concurrency) as pool:
        return [outcome for outcomes in pool.map(ask, dialogues) for outcome in outcomes]


def _in_session(client: Client, dialogue: Sequence[DialogueTurn], options: Options) -> Iterator[TurnOutcome]:
    session: str = "new"
    named: dict[str, Any] = {"strategy": options.strategy, "strategy_options": options.sent}
    if options.session_budget is not None:
        named["session_budget"] = options.session_budget
    try:
        for number, turn in enumerate(dialogue, 1):
            try:
                answer = _asked(
                    client,
                    turn,
                    options,
                    _sent(turn.documents),
                    session=session,
                    decode=options.decode,
                    **named,
                )
            except RagserveError as error:
                yield TurnOutcome(number, turn, failed(turn.question, error))
                continue
            use, named = answer.session, {}
            if use is None:
                raise RagserveError("The server has no sessions.", hint="Upgrade it.")
            session = use.id
            yield TurnOutcome(
                number, turn, outcome_of(turn.question, answer), use.tokens_held, use.tokens_computed
            )
    finally:
        with suppress(RagserveError):  # it ends by itself in time, and the turns' failures are known
            if session != "new":
                client.end_session(session)


def _with_history(
    client: Client, dialogue: Sequence[DialogueTurn], options: Options
) -> Iterator[TurnOutcome]:
    history: list[Turn] = []
    documents: list[ContextDocument] = []
    for number, turn in enumerate(dialogue, 1):
        documents = _sent(turn.documents) + documents
        try:
            answer = _asked(client, turn, options, documents, history=list(history), strategy="prefix")
        except RagserveError as error:
            yield TurnOutcome(number, turn, failed(turn.question, error))
            continue
        history += [
            {"role": "user", "content": turn.question.question},
            {"role": "assistant", "content": answer.answer},
        ]
        yield TurnOutcome(number, turn, outcome_of(turn.question, answer))


def _asked(
    client: Client, turn: DialogueTurn, options: Options, documents: list[ContextDocument], **fields: Any
) -> Any:
    return client.query(
        turn.question.question,
        documents=documents,
        documents_overflow="drop",
        max_new_tokens=options.max_new_tokens,
        temperature=0.0,
        **fields,
    )


def _sent(documents: Sequence[GivenPassage]) -> list[ContextDocument]:
    return [{"title": each.title, "text": each.text} for each in documents]


def by_turn(label: str, outcomes: Sequence[TurnOutcome], full: Sequence[TurnOutcome]) -> list[dict[str, Any]]:
    """A line for each turn of a strategy. ``full``: the outcomes of full prefill, or none."""
    same = {id(one.turn): one.answer.answer for one in full if not one.answer.error}
    lines = []
    for number in sorted({one.number for one in outcomes}):
        own = [one for one in outcomes if one.number == number]
        answered = [one for one in own if not one.answer.error]
        beside = [
            not one.answer.error and one.answer.answer == same[id(one.turn)]
            for one in own
            if id(one.turn) in same
        ]
        figures = summary([one.answer for one in own])
        names = ("n", "em", "f1", "failed", "ttft_ms_mean", "ttft_ms_p50", "prompt_tokens", "cached_tokens")
        lines.append(
            {
                "strategy": label,
                "turn": number,
                **{name: figures[name] for name in names},
                "as_full": round(100 * sum(beside) / len(beside), 2) if beside else None,
                **{
                    place: _f1([one for one in own if one.turn.place == place])
                    for place in ("here", "earlier")
                },
                "held": _mean([one.held for one in answered]),
                "computed": _mean([one.computed for one in answered]),
                "documents_dropped": figures["documents_dropped"],
            }
        )
    return lines


def _mean(tokens: Sequence[int]) -> float | None:
    return round(sum(tokens) / len(tokens), 1) if tokens else None


def _f1(outcomes: Sequence[TurnOutcome]) -> float | None:
    return round(100 * sum(one.answer.f1 for one in outcomes) / len(outcomes), 2) if outcomes else None
