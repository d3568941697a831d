"""Options of sparse decoding, each with its bounds and text: `DecodeOptions`, `AttentionConfig` and the
server's settings are made of these. Plain data, without torch or SGLang."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

MAX_WINDOW = 64
MORE_TOKENS = 2**31  # than any context has

Mode = Annotated[
    Literal["dense", "hierarchical", "progressive"],
    Field(
        description="`dense`: attend to all pages; `hierarchical`: to the best within the budget; "
        "`progressive` (experimental): to the best until the threshold is reached."
    ),
]
Budget = Annotated[
    int,
    Field(
        ge=1,
        lt=MORE_TOKENS,
        description="hierarchical: tokens a step reads for a KV head; progressive: of a selection.",
    ),
]
Reuse = Annotated[int, Field(ge=1, lt=MORE_TOKENS, description="Steps that share one page selection.")]
Observe = Annotated[
    Literal["last", "window", "prompt", "recent"],
    Field(
        description="hierarchical: what selects pages: the mean of a `window` of queries, the `last` query, "
        "the mean of the `prompt`'s last ones, or (`recent`) none: the first and newest pages are read."
    ),
]
Window = Annotated[int, Field(ge=1, le=MAX_WINDOW, description="Queries of `window` and `prompt`.")]
Scores = Annotated[
    Literal["auto", "bound", "exact"],
    Field(
        description="hierarchical: a page scores its bound of q . k, or the largest q . k of all its keys "
        "(exact); auto: exact where keys have 16 bits and stay on the device."
    ),
]
Threshold = Annotated[
    float, Field(gt=0, le=1, description="progressive: estimated share of the attention weight to reach.")
]
LogicalPage = Annotated[
    int, Field(ge=1, description="Tokens that share one min and max key; a page scores as the best of them.")
]
MaxBudget = Annotated[
    int, Field(ge=1, description="Largest budget of a request, tokens. Page tables are that wide.")
]
Ranking = Annotated[
    Literal["minmax", "center"],
    Field(
        description="progressive: rank pages by the best bound of their logical pages (minmax), or by the "
        "centre of their keys' bounding box."
    ),
]
Bound = Annotated[
    Literal["round", "lowest"],
    Field(
        description="progressive: weight assumed for an unread page: the latest round's mean, or the lowest."
    ),
]
HeadsPool = Annotated[
    Literal["shared", "own"],
    Field(
        description="own (experimental): streaming heads keep their first and latest tokens only, in a pool "
        "of their own, so that more tokens fit. They stream in every request and in prefill; no KV serves "
        "other requests, and nothing is composed."
    ),
]
OffloadBytes = Annotated[
    int,
    Field(ge=0, description="Host memory of all ranks for the KV of offloaded requests, bytes; 0: none are."),
]
OffloadTokens = Annotated[
    int,
    Field(
        ge=0,
        description="GPU room for page statistics of offloaded requests, in tokens. Raise it above what the "
        "bytes imply when contexts are read in place from document pages.",
    ),
]
InjectTokens = Annotated[
    int | None,
    Field(
        ge=0,
        description="Layer-segmented prefill (experimental): tokens times layers of an offloaded prompt, too "
        "large for the KV pool, that are prefilled per batch. Default: a prefill chunk in every layer; 0: "
        "such prompts wait, or are refused.",
    ),
]


def decided_scores(scores: Scores, *, kv_bits: int, on_device: bool) -> Scores:
    """``scores``, decided where they are auto, for keys of ``kv_bits`` that do, or do not, stay on the
    device."""
    if scores != "auto":
        return scores
    return "exact" if kv_bits == 16 and on_device else "bound"
