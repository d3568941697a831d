"""A LlamaIndex retriever over a running ragserve.

    pip install llama-index-core
    python examples/llamaindex_retriever.py "What is the capital of Norway?" --namespace demo

Query engines take it as they take any `BaseRetriever`. Search options are those of `/rag/retrieve`
(docs/retrieval.md)."""

from __future__ import annotations

import argparse
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.schema import NodeRelationship, NodeWithScore, QueryBundle, RelatedNodeInfo, TextNode

from ragserve import AsyncClient, Client
from ragserve.client import RetrievedPassage


class RagserveRetriever(BaseRetriever):
    """Retrieves from one namespace. ``async_client`` serves `aretrieve`, which blocks without it.

    A node's metadata are those of its document's ingestion, and the passage's: source, title, page, place
    and scores. Models read title, source and page of them."""

    def __init__(
        self,
        client: Client,
        *,
        async_client: AsyncClient | None = None,
        namespace: str = "default",
        k: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._client, self._async_client = client, async_client
        self._fields: dict[str, Any] = {"namespace": namespace, "k": k, **options}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        found = self._client.retrieve(query_bundle.query_str, **self._fields)
        return [node_of(passage) for passage in found.results]

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        if self._async_client is None:
            return self._retrieve(query_bundle)
        found = await self._async_client.retrieve(query_bundle.query_str, **self._fields)
        return [node_of(passage) for passage in found.results]


def node_of(passage: RetrievedPassage) -> NodeWithScore:
    """The passage as LlamaIndex's node, with its score and its document."""
    own = passage.model_dump(exclude={"text", "index", "metadata"}, exclude_none=True)
    metadata = passage.metadata | own
    hidden = [name for name in metadata if name not in ("title", "source", "page")]
    node = TextNode(
        id_=str(passage.chunk_id),
        text=passage.text,
        metadata=metadata,
        excluded_llm_metadata_keys=hidden,
        excluded_embed_metadata_keys=hidden,
        start_char_idx=passage.start,
        end_char_idx=passage.end,
        relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=str(passage.doc_id))},
    )
    return NodeWithScore(node=node, score=passage.score)


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
        retriever = RagserveRetriever(client, namespace=given.namespace, k=given.k)
        for found in retriever.retrieve(given.question):
            print(
                f"{found.score or 0:.3f}  {found.node.metadata['source']}: {found.node.get_content()[:80]!r}"
            )


if __name__ == "__main__":
    main()
