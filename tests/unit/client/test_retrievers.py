"""The retrievers of examples/ for LangChain and LlamaIndex, by the real packages, on the product's app."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from langchain_core.runnables import RunnableLambda
from llama_index.core.schema import MetadataMode, NodeRelationship

from examples.langchain_retriever import RagserveRetriever as LangChainRetriever
from examples.llamaindex_retriever import RagserveRetriever as LlamaIndexRetriever
from ragserve import AsyncClient, Client
from ragserve.errors import NotFound
from tests.unit.api.scripted_server import DOCUMENTS, Live

QUESTION = "Who built the lighthouse of Skerryvore?"


def test_langchain(live: Live, docs: str) -> None:
    with Client(live.url) as client:
        retriever = LangChainRetriever(client=client, namespace=docs, k=2, options={"retrieval": "hybrid"})
        first, second = retriever.invoke(QUESTION)
        chain = retriever | RunnableLambda(lambda documents: documents[0].page_content)
        assert chain.invoke(QUESTION) == DOCUMENTS["skerryvore"]
        in_thread = asyncio.run(retriever.ainvoke(QUESTION))
        with pytest.raises(NotFound):
            LangChainRetriever(client=client, namespace="nowhere").invoke(QUESTION)

    async def alone() -> list[Any]:
        async with AsyncClient(live.url) as waiting:
            return await LangChainRetriever(
                client=client, async_client=waiting, namespace=docs, k=2, options={"retrieval": "hybrid"}
            ).ainvoke(QUESTION)

    assert asyncio.run(alone()) == in_thread == [first, second], "the other client is closed"
    assert (first.page_content, first.metadata["source"]) == (DOCUMENTS["skerryvore"], "skerryvore")
    assert first.metadata["lang"] == "en"
    assert first.metadata["score"] > second.metadata["score"]
    assert {"doc_id", "chunk_id", "title", "start", "end", "cosine", "bm25"} <= first.metadata.keys()
    assert first.id == str(first.metadata["chunk_id"])


def test_llamaindex(live: Live, docs: str) -> None:
    with Client(live.url) as client:
        first, second = LlamaIndexRetriever(client, namespace=docs, k=2).retrieve(QUESTION)
        chosen = {"op": "eq", "field": "name", "value": "soup"}
        [soup] = LlamaIndexRetriever(client, namespace=docs, filter=chosen).retrieve(QUESTION)

    async def alone() -> list[Any]:
        async with AsyncClient(live.url) as waiting:
            return await LlamaIndexRetriever(client, async_client=waiting, namespace=docs, k=2).aretrieve(
                QUESTION
            )

    assert asyncio.run(alone()) == [first, second]
    assert soup.node.get_content() == DOCUMENTS["soup"]
    assert first.score is not None
    assert first.score > (second.score or 0.0)
    node = first.node
    assert (node.metadata["source"], node.metadata["lang"]) == ("skerryvore", "en")
    assert node.relationships[NodeRelationship.SOURCE].node_id == node.metadata["doc_id"]  # type: ignore[union-attr]
    read = node.get_content(metadata_mode=MetadataMode.LLM)
    assert "title: Skerryvore" in read
    assert "cosine" not in read
