"""Makes rows of a namespace: questions of users and about its chunks, as `ragserve tune` makes them, each
over the passages that a search finds."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, suppress
from itertools import chain
from typing import TYPE_CHECKING

from ragserve.adapt.batched_engine import BatchedEngine
from ragserve.adapt.sample_mix import leaves_room
from ragserve.adapt.training_rows import TrainingPassage, TrainingRow
from ragserve.answering.follow_ups import passages
from ragserve.errors import InvalidRequest, PromptTooLong
from ragserve.retrieval.search_options import SearchOptions
from ragserve.verification.metrics import contains_answer
from ragserve.verification.questions import DrawnQuestion, asked, drawn
from ragserve_index.types import Chunk

if TYPE_CHECKING:
    from ragserve.adapt.low_rank import AdaptedModel
    from ragserve.answering.prompt import PromptBuilder
    from ragserve.config import Settings
    from ragserve.retrieval.passage_search import PassageSearch
    from ragserve.verification.question_probes import Probes

_AT_ONCE, _AT_ONCE_ON_GPU = 64, 256  # chunks that are asked about together
_OTHERS = 3  # further questions about a chunk, at most
_TWO_OF = 4  # one chunk of so many is asked about together with the nearest other


def make_rows(
    settings: Settings,
    namespace: str,
    model: AdaptedModel,
    builder: PromptBuilder,
    room: int,
    most: int,
    on_progress: Callable[[str, str], None],
) -> list[TrainingRow]:
    """Make at most ``most`` rows: one a chunk, and up to four where there are few chunks. Chunks and users'
    questions that do not fit into a prompt of ``room`` tokens are left out. Raises NotFound for an unknown
    namespace, and InvalidRequest for one without passages."""
    return asyncio.run(_make(settings, namespace, model, builder, room, most, on_progress))


async def _make(
    settings: Settings,
    namespace: str,
    model: AdaptedModel,
    builder: PromptBuilder,
    room: int,
    most: int,
    on_progress: Callable[[str, str], None],
) -> list[TrainingRow]:
    from ragserve.answering.query_log import LoggedQuestions
    from ragserve.retrieval.document_store import open_store
    from ragserve.retrieval.embedder import Embedder
    from ragserve.retrieval.passage_search import PassageSearch
    from ragserve.retrieval.retriever import Retriever
    from ragserve.verification.question_probes import Probes

    rows: list[TrainingRow] = []
    tried = 0
    async with AsyncExitStack() as stack:
        store = stack.enter_context(open_store(settings))
        logged = LoggedQuestions(settings.data_dir, store, namespace, most)
        source: Iterator[DrawnQuestion | Chunk] = chain(asked(logged), drawn(store, namespace))
        embedder = await asyncio.to_thread(Embedder.of, settings)
        retriever = Retriever(store, embedder)
        stack.push_async_callback(retriever.close)
        search = PassageSearch(retriever)
        probes = Probes(BatchedEngine(model), search, builder, namespace, room)
        chunks = store.namespace(namespace).n_chunks
        others = min(_OTHERS, (most - 1) // max(chunks, 1))
        maker = _RowMaker(probes, search, settings, namespace, builder, room, others)
        at_once = _AT_ONCE_ON_GPU if model.device.type == "cuda" else _AT_ONCE
        while len(rows) < most:
            batch = [each for _ in range(at_once) if (each := next(source, None)) is not None]
            if not batch:
                break
            found = await asyncio.gather(
                *(maker.rows(each, two=(tried + n) % _TWO_OF == 0) for n, each in enumerate(batch))
            )
            tried += len(batch)
            rows += [row for of_one in found for row in of_one]
            long = f"; {maker.too_long:,} do not fit into {room:,} tokens" if maker.too_long else ""
            on_progress("questions", f"{len(rows):,} about {tried:,} chunks and users' questions{long}")
    if not tried:
        raise InvalidRequest(
            f"Namespace {namespace!r} has no passages to ask about.",
            hint="Ingest documents first, with passages of 12 words or more.",
        )
    return rows[:most]


class _RowMaker:
    """Makes rows with one search and prober; ``others``: further questions about a chunk. ``too_long``:
    chunks and questions that did not fit so far."""

    def __init__(
        self,
        probes: Probes,
        search: PassageSearch,
        settings: Settings,
        namespace: str,
        builder: PromptBuilder,
        room: int,
        others: int,
    ) -> None:
        self._others = others
        self._probes, self._search, self._namespace = probes, search, namespace
        self._builder, self._room = builder, room
        self.too_long = 0
        self._options = SearchOptions(settings.top_k, retrieval=settings.retrieval)

    async def rows(self, about: DrawnQuestion | Chunk, *, two: bool) -> list[TrainingRow]:
        """The rows of a user's question or of those about a chunk; empty where none can be used."""
        chunk = about if isinstance(about, Chunk) else None
        found: list[TrainingRow] = []
        try:
            for question in await self._questions(about, two=two):
                found.append(await self._row(question, chunk))
        except PromptTooLong:
            self.too_long += 1
        fitting = [row for row in found if leaves_room(row, self._builder, self._room)]
        self.too_long += len(found) - len(fitting)
        return fitting

    async def _questions(self, about: DrawnQuestion | Chunk, *, two: bool) -> list[DrawnQuestion]:
        if not isinstance(about, Chunk):
            question = await self._probes.of_user(about)
            return [] if question is None else [question]
        if (first := await self._probes.about(about, two=two)) is None:
            return []
        with suppress(PromptTooLong):
            return [first, *await self._probes.others(about, first, self._others)]
        return [first]

    async def _row(self, question: DrawnQuestion, chunk: Chunk | None) -> TrainingRow:
        """A question's row. ``chunk``: the one that it is about."""
        found = passages((await self._search.search(self._namespace, question.text, self._options)).passages)
        shown = [
            TrainingPassage(title=each.title or "", text=each.text) for each in found if each.text.strip()
        ]
        if chunk is not None and all(each.text != chunk.text for each in shown):
            place = random.Random(chunk.chunk_id).randrange(len(shown) + 1)
            shown.insert(place, TrainingPassage(title=chunk.title or "", text=chunk.text))
        gold = [
            place
            for place, each in enumerate(shown)
            if (chunk is not None and each.text == chunk.text)
            or contains_answer(f"{each.title} {each.text}", question.references)
        ]
        is_pair = question.kind == "pair"  # about two chunks, of which one is known here
        own = [place for place in gold if chunk is not None and shown[place].text == chunk.text]
        return TrainingRow(
            question=question.text,
            answer=", ".join(question.references if is_pair else question.references[:1]),
            passages=tuple(shown),
            gold=tuple(gold),
            about=() if is_pair else tuple(own),
        )
