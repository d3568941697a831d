"""How much of a dialogue's earlier turns may be left out, by the rule that chooses what stays?

    python -m benchmarks.earlier_turns OUT.json SET.jsonl.gz... [--dialogues N] [--turns N] [--ahead N]
        [--budgets N,N,...] [--documents N] [--model MODEL]

Dialogues of consecutive questions of a set, whose documents come ``--ahead`` turns before their question (of
each question ``--documents`` in a row, the last one that holds the answer at their end), are led along by
`prefix` over the whole dialogue. The last question is then asked over all of it (`everything`), and over
dialogues whose turns before the last one are compressed for it to so many tokens: by `words`, and as sessions
do it (`samkv`: words, and attention to the KV that the session holds). Rows give the F1 of the answer, how
often the prompt has the answer's words, and the tokens kept of each earlier turn. Runs on a CPU,
and on a GPU."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.fan_out import engine_args
from ragserve.answering.prompt import Prompt, PromptBuilder, PromptDocument
from ragserve.answering.sessions.past_turns import PastTurn, SessionKv, ids_of
from ragserve.answering.sessions.turn_attention import TurnAttention
from ragserve.answering.sessions.turn_compression import ShortenedDialogue, TurnCompressor
from ragserve.config import DEFAULT_MODEL, Settings
from ragserve.engine.base import GenerateRequest, Sampling
from ragserve.engine.local import LocalEngine
from ragserve.engine.offline import run_once
from ragserve.eval.data import Question, load, set_name
from ragserve.eval.multiturn import DialogueTurn, brought_ahead
from ragserve.eval.multiturn_engine import answered_turn, earlier_of, kept_of
from ragserve.verification import report
from ragserve.verification.engine_run import first_token
from ragserve.verification.metrics import contains_answer, token_f1
from sglang_ext.wire.protocol import session_key

NAMESPACE = "earlier"
POOL_TOKENS = 65_536  # several dialogues' KV
NOTE = (
    "f1: percent, of the last answer. in_prompt: percent of the last prompts with an answer's words. kept: "
    "tokens left of each turn before the last one, mean. signals: tokens of the kept sentences by the signal "
    "that speaks most for each. attended: percent of the turns whose sentences were scored by attention, too."
)
Line = dict[str, Any]


class Dialogue:
    """A dialogue in a session of its own."""

    def __init__(self, engine: LocalEngine, builder: PromptBuilder, number: int) -> None:
        self._engine, self._builder = engine, builder
        self._compressor = TurnCompressor(builder, TurnAttention(engine, builder))
        self._sampling = Sampling(max_new_tokens=24)
        self._key = session_key(NAMESPACE, f"{number:032x}")
        self._past: list[PastTurn] = []
        self._prompts: list[tuple[PastTurn, ...]] = []

    async def lead(self, turn: DialogueTurn) -> None:
        """Answer a turn over all that was said, and go on from its answer."""
        question, documents = turn.question.question, turn.documents
        prompt = self._prompt(self._past, question, [PromptDocument("", d.title, d.text) for d in documents])
        ids, text = await self._answer(self._past, prompt, self._key)
        answer = self._builder.answer_ids(ids, text)
        behind = len(ids_of(self._past))
        self._past.append(answered_turn(prompt, answer, question, documents, behind=behind))
        self._prompts.append(tuple(self._past))

    async def ask(self, turn: DialogueTurn, budgets: Sequence[int]) -> list[Line]:
        """Ask a turn that brings no documents, over everything and within each of the budgets."""
        question, answers = turn.question.question, turn.question.answers
        ways: list[tuple[str, int | None, ShortenedDialogue | None]] = [("everything", None, None)]
        candidates = await self._compressor.attended(self._past, question, (), self._key, self._prompts)
        for budget in budgets:
            for rule, own in (("words", None), ("samkv", candidates)):
                short = self._compressor.shorten(self._past, question, budget, candidates=own)
                ways.append((rule, budget, short))
        lines = []
        for rule, budget, shortened in ways:
            past = self._past if shortened is None else shortened.turns
            prompt = self._prompt(past, question, ())
            key = self._key if shortened is None else f"{self._key}-{rule}-{budget}"
            _, text = await self._answer(past, prompt, key)
            lines.append(
                {
                    "rule": rule,
                    "budget": budget,
                    "f1": 100 * token_f1(text, answers),
                    "in_prompt": 100 * contains_answer(self._builder.words(prompt.input_ids), answers),
                    "prompt_tokens": len(prompt.input_ids),
                    **kept_of([] if shortened is None else shortened.report[:-1]),
                }
            )
        return lines

    def _prompt(self, past: Sequence[PastTurn], question: str, documents: Sequence[PromptDocument]) -> Prompt:
        room = self._engine.info.max_prompt_tokens - self._sampling.max_new_tokens
        if not past:
            return self._builder.build(question, documents, max_prompt_tokens=room)
        return self._builder.follow_up(ids_of(past), question, documents, max_prompt_tokens=room)

    async def _answer(self, past: Sequence[PastTurn], prompt: Prompt, key: str) -> tuple[Sequence[int], str]:
        """Token ids of the answer of `prefix`, and its text."""
        sampling = Sampling(self._sampling.max_new_tokens, stop=prompt.stop)
        request = GenerateRequest("earlier", prompt.input_ids, NAMESPACE, "prefix", sampling, prompt.spans)
        last = await first_token(self._engine, SessionKv(past, key).request(request))
        return last.last.output_ids, last.text


def fewer(question: Question, count: int | None) -> Question:
    """The question with so many documents in a row, up to the last one that holds the answer."""
    documents = question.documents
    if count is None or not question.gold:
        return question
    end = max(count, 1 + max(documents.index(each) for each in question.gold))
    return replace(question, documents=documents[end - count : end])


def rows_of(name: str, lines: Sequence[Line]) -> Iterator[Line]:
    """Means over the dialogues of a set, by rule and budget."""
    for rule, budget in dict.fromkeys((line["rule"], line["budget"]) for line in lines):
        own = [line for line in lines if (line["rule"], line["budget"]) == (rule, budget)]
        means = {
            figure: round(sum(line[figure] for line in own) / len(own), 1)
            for figure in ("f1", "in_prompt", "prompt_tokens")
        }
        kept = earlier_of([line for line in own if "kept" in line])
        yield {"set": name, "rule": rule, "budget": budget, "dialogues": len(own), **means, **kept}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("out", type=Path)
    options.add_argument("sets", type=Path, nargs="+")
    options.add_argument("--dialogues", type=int, default=20, help="of each set")
    options.add_argument("--turns", type=int, default=4)
    options.add_argument("--ahead", type=int, default=2)
    options.add_argument("--budgets", default="100,250,500", help="tokens of the turns before the last one")
    options.add_argument("--documents", type=int, help="of each question, so many; all by default")
    options.add_argument("--model", default=DEFAULT_MODEL)
    given = options.parse_args()
    budgets = [int(budget) for budget in given.budgets.split(",")]
    groups = {path: load(path, given.dialogues * given.turns) for path in given.sets}
    made = {
        path: [
            brought_ahead(
                [fewer(one, given.documents) for one in questions[at : at + given.turns]], given.ahead
            )
            for at in range(0, len(questions), given.turns)
        ]
        for path, questions in groups.items()
    }
    workload = {
        "model": Path(given.model).name,
        "turns": given.turns,
        "ahead": given.ahead,
        "documents": given.documents,
    }

    async def work(engine: LocalEngine) -> None:
        builder, rows = PromptBuilder.load(engine.info.tokenizer), []
        for path, dialogues in made.items():
            lines: list[Line] = []
            for number, turns in enumerate(dialogues):
                dialogue = Dialogue(engine, builder, number)
                for turn in turns[:-1]:
                    await dialogue.lead(turn)
                lines += await dialogue.ask(turns[-1], budgets)
                shown = [*rows, *rows_of(set_name(path), lines)]  # written as it grows: it takes long
                report.write("earlier turns", workload, shown, out=given.out, note=NOTE)
            rows = shown

    with tempfile.TemporaryDirectory(prefix="ragserve-earlier-") as folder:
        settings: dict[str, Any] = {"model": given.model, "data_dir": Path(folder), "kv_disk_bytes": 0}
        graphs: dict[str, Any] = {}
        if torch.cuda.is_available():  # small: starting matters more here than decoding
            graphs = {"cuda_graph_max_bs_decode": 4, "disable_prefill_cuda_graph": True}
        arguments = graphs | engine_args(None)
        run_once(Settings(**settings, max_total_tokens=POOL_TOKENS, engine_args=arguments), work)


if __name__ == "__main__":
    main()
