"""Learn the weights of the selection signals on a namespace's own passages, with the engine's attention."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ragserve.answering.prompt import PromptBuilder, load_tokenizer
from ragserve.ingest.prune import every_document
from ragserve.retrieval.embedder import Embedder
from ragserve.verification.calibration.signal_weights import LearnedWeights, ProbeContext, contexts, learn
from ragserve.verification.given_scores import GivenScores

if TYPE_CHECKING:
    from ragserve.config import Settings
    from ragserve.engine.local import LocalEngine
    from ragserve_index import IndexStore

PASSAGES, PROBES = 400, 96
_DEPTH = 8  # passages of a context
_OF_A_DOCUMENT = 20  # passages


@dataclass(frozen=True, slots=True)
class NamespacePassage:
    """A chunk's text with its document's title."""

    title: str
    text: str


def drawn_passages(
    store: IndexStore, namespace: str, most: int = PASSAGES, seed: int = 0
) -> list[NamespacePassage]:
    """The first passages of documents drawn from a namespace, without copies: neighbours in a document are
    what is hard to tell apart. Raises NotFound for an unknown namespace."""
    documents = list(every_document(store, namespace))
    random.Random(seed).shuffle(documents)
    found: dict[str, NamespacePassage] = {}
    for document in documents:
        for chunk in store.document_chunks(namespace, document.doc_id)[:_OF_A_DOCUMENT]:
            found.setdefault(chunk.text, NamespacePassage(chunk.title, chunk.text))
        if len(found) >= most:
            break
    return list(found.values())[:most]


async def learn_on(
    settings: Settings,
    engine: LocalEngine,
    passages: Sequence[NamespacePassage],
    report: Callable[[str], None],
) -> LearnedWeights:
    """Learn weights for the engine's model; ``report`` gets a line for each step. Raises InvalidRequest for
    too few passages."""
    from ragserve.answering.sessions.sentence_choice import SentenceChooser

    info = engine.info
    report(f"signals: embedding {len(passages)} passages")
    builder = PromptBuilder.load(info.tokenizer, settings.system_prompt)

    def probed() -> list[ProbeContext]:
        embedder = Embedder.of(settings)
        given = GivenScores(builder, embedder, passages, settings.sentence_bytes)
        return contexts(passages, builder, embedder, given, count=PROBES, depth=_DEPTH)

    found = await asyncio.to_thread(probed)
    fitting = [each for each in found if len(each.prompt.input_ids) <= info.max_prompt_tokens]
    probes: list[ProbeContext] = []
    for each in fitting:
        probes.append(replace(each, attended=await _attention(engine, each)))
        if len(probes) % 16 == 0:
            report(f"signals: attention of {len(probes)} of {len(fitting)} probes")
    report("signals: looking for weights")
    chooser = await asyncio.to_thread(lambda: SentenceChooser(load_tokenizer(info.tokenizer)))
    return await asyncio.to_thread(learn, chooser, probes)


async def _attention(engine: LocalEngine, context: ProbeContext) -> list[float]:
    """Signal `attention` of the context's sentences."""
    prompt, end = context.prompt, context.prompt.spans[-1].end
    question = {"ids": prompt.input_ids[end:], "needed": [list(context.needed)]}
    spans = [[span.start, span.end] for span in prompt.spans]
    answer = await engine.control(
        "probe", ids=prompt.input_ids[:end], spans=spans, questions=[question], attention=True
    )
    [found] = answer["attention"]
    return [float(value) for value in found]
