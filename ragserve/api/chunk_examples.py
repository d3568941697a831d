"""Examples of the OpenAPI document: chunks, and changes of them."""

from __future__ import annotations

from typing import Any

from ragserve.api.examples import CHUNK, request
from ragserve.api.views import PreviewedChunk

CHUNKS = {"chunks": [CHUNK], "next": None}
_TEXT = f"{CHUNK['text']} (Corrected.)"
EDITED_CHUNK: dict[str, Any] = {
    **CHUNK,
    "chunk_id": 449,
    "text": _TEXT,
    "n_tokens": 65,
    "edited": True,
    "original": CHUNK["text"],
    "version": "51c7f00e9ad3b862",
}
CHANGES: dict[str, Any] = {
    "edit": request("Correct its text", version=CHUNK["version"], text=_TEXT),
    "disable": request("Take it out of every search", version=CHUNK["version"], disabled=True),
    "enable": request("Search it again", version=CHUNK["version"], disabled=False),
}
LOST: dict[str, Any] = {
    "lost": [
        {
            "ordinal": 3,
            "page": None,
            "original": CHUNK["text"],
            "text": _TEXT,
            "disabled": False,
            "lost_at": 1767225600.0,
        }
    ]
}
NOTHING_LOST: dict[str, Any] = {"lost": []}
PREVIEW_FORM: dict[str, Any] = {
    "small": request("Chunks of 128 tokens", file="lighthouse.md", chunk_tokens=128)
}
PREVIEW: dict[str, Any] = {
    "filename": "lighthouse.docx",
    "title": "Lighthouses",
    "mime": "application/vnd.openxmlformats-officedocument.wordprocessingml.document",
    "size_bytes": 18204,
    "chunk_tokens": 256,
    "n_chunks": 31,
    "n_tokens": 5210,
    "note": "left out: 1 hidden rows",
    "metadata": {},
    "chunks": [{name: CHUNK[name] for name in PreviewedChunk.model_fields}],
}
