"""A LangChain retriever over a running ragserve.

    pip install langchain-core
    python examples/langchain_retriever.py "What is the capital of Norway?" --namespace demo

Chains take it as they take any `BaseRetriever`. Search options are those of `/rag/retrieve`
(docs/retrieval.md)."""

from __future__ import annotations

import argparse
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import ConfigDict, Field

from ragserve import AsyncClient, Client
from ragserve.client import RetrievedPassage


class RagserveRetriever(BaseRetriever):
    """Retrieves from one namespace. ``async_client`` serves `ainvoke`, which uses a thread without it.

    A document's metadata are those of its ingestion, and the passage's: source, title, page, place and
    scores."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    client: Client
    async_client: AsyncClient | None = None
    namespace: str = "default"
    k: int | None = None
    options: dict[str, Any] = Field(default_factory=dict)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        found = self.client.retrieve(query, namespace=self.namespace, k=self.k, **self.options)
        return [document_of(passage) for passage in found.results]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if self.async_client is None:
            return await super()._aget_relevant_documents(query, run_manager=run_manager)
        found = await self.async_client.retrieve(query, namespace=self.namespace, k=self.k, **self.options)
        return [document_of(passage) for passage in found.results]


def document_of(passage: RetrievedPassage) -> Document:
    """The passage as LangChain's document."""
    own = passage.model_dump(exclude={"text", "index", "metadata"}, exclude_none=True)
    return Document(page_content=passage.text, id=str(passage.chunk_id), metadata=passage.metadata | own)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("question")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--api-key")
    parser.add_argument("--namespace", default="default")
    parser.add_argument("--k", type=int)
    given = parser.parse_args()
    with Client(given.url, api_key=given.api_key) as client:
        retriever = RagserveRetriever(client=client, namespace=given.namespace, k=given.k)
        for document in retriever.invoke(given.question):
            about = document.metadata
            print(f"{about.get('score', 0):.3f}  {about['source']}: {document.page_content[:80]!r}")


if __name__ == "__main__":
    main()
