"""Examples of the OpenAPI document: chunks, and changes of them."""

from __future__ import annotations

from typing import Any

from ragserve.api.examples import CHUNK, request

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
