"""How documents are read, cut and indexed."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, field_validator

from ragserve.errors import InvalidRequest
from ragserve.ingest.connectors.source_addresses import parse_address
from sglang_ext.wire.protocol import NAMESPACE

IndexType = Literal["flat", "sq8", "ivf", "hnsw"]


class IngestionSettings(BaseModel):
    """Ingestion and index; each field states its purpose and its unit."""

    sentence_bytes: int = Field(
        16,
        ge=0,
        le=1024,
        description="Bytes a token to store for embeddings of a chunk's sentences, by which `samkv` finds "
        "what to keep. A sentence takes 390 with the default embedder. 0 embeds none, which halves the time "
        "for embedding.",
    )
    chunk_tokens: int = Field(
        256, ge=16, le=8192, description="Largest chunk, in tokens of the serving model."
    )
    index_type: IndexType = Field("flat", description="FAISS index type of new namespaces.")
    index_device: Literal["cpu", "gpu"] = Field(
        "cpu", description="Device of the index; gpu needs faiss-gpu."
    )
    embed_batch: int = Field(32, ge=1, le=4096, description="Chunks per forward pass of the embedder.")
    embed_device: str = Field("auto", description="torch device of the embedder; auto: cuda if available.")
    parse_timeout_s: float = Field(120, gt=0, description="Seconds after which parsing a file is given up.")
    ocr: Literal["off", "docling"] = Field(
        "off", description="What reads images and scanned PDFs; docling needs the extra `docling`."
    )
    ingest_hidden: bool = Field(
        False,
        description="Index also what no reader of a document sees: hidden text, rows, sheets and slides. "
        "Such text may have been put there for models alone. Else the job's report counts it.",
    )
    ingest_comments: bool = Field(
        True, description="Index the comments in Word, Excel and PowerPoint files, marked as such."
    )
    url_ingestion: Literal["public", "any", "off"] = Field(
        "public",
        description="URLs that clients may have ingested by POST /rag/ingest. public: those of public "
        "addresses; any: those of this machine and its networks, too.",
    )
    robots: Literal["honour", "ignore"] = Field(
        "honour", description="What to do with a site's robots.txt; ignore it on a site of your own."
    )
    sitemap_urls: int = Field(1000, ge=1, le=1_000_000, description="Most URLs that a sitemap may add.")
    client_sources: dict[str, list[str]] = Field(
        default_factory=dict,
        description="S3 folders and git repositories that clients may have ingested by POST /rag/ingest, "
        "with the server's credentials, by namespace or the beginning of names and *.",
    )
    source_files: int = Field(
        100_000, ge=1, le=10_000_000, description="Most files of an S3 folder or a git repository."
    )
    source_bytes: int = Field(
        2 * 2**30,
        ge=2**20,
        description="Most bytes that a job brings from a git repository, as git packs them.",
    )

    @field_validator("client_sources")
    @classmethod
    def _addresses(cls, sources: dict[str, list[str]]) -> dict[str, list[str]]:
        for pattern, addresses in sources.items():
            if pattern != "*" and not NAMESPACE.fullmatch(pattern.removesuffix("*")):
                raise ValueError(f"{pattern!r:.80} is no namespace, and no beginning of names and *")
            for address in addresses:
                try:
                    parse_address(address)
                except InvalidRequest as error:
                    raise ValueError(str(error)) from None
        return sources
