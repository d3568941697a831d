"""Bodies of requests; those of answers are in `ragserve.api.views`. The routes check the limits that are
settings."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, Union

from pydantic import BeforeValidator, Field, create_model, model_validator

from ragserve.answering.results import Overflow
from ragserve.api.body import NonBlank, RequestModel, Text
from ragserve.api.search_fields import SearchFields
from ragserve.best_passages import PassagesOptions
from ragserve.config import Namespace, StrategyName
from ragserve.tenants.key_file import Pattern
from ragserve_index.viewers import LABEL, MAX_LABELS
from sglang_ext.wire.joint_names import MOST as MOST_NAMESPACES
from sglang_ext.wire.prefill_options import PrefillOptions
from sglang_ext.wire.request_options import STRATEGY_OPTIONS, DecodeOptions, RequestOptions

MAX_DOCUMENTS = 256
MAX_MESSAGES = 4096  # max_history_messages is at most that
MAX_TEXT_CHARS = 4 * 2**20
Stop = Annotated[str, Field(min_length=1, max_length=256)]
MetadataKey = Annotated[Text, Field(min_length=1, max_length=128)]
MetadataText = Annotated[Text, Field(max_length=4096)]
Metadata = Annotated[
    dict[
        MetadataKey,
        MetadataText | bool | int | float | Annotated[list[MetadataText], Field(max_length=256)] | None,
    ],
    Field(max_length=64, description="Fields of your own, for filters."),
]
Label = Annotated[str, Field(pattern=rf"^{LABEL.pattern}$")]
DocumentLabels = Annotated[
    list[Label],
    Field(
        max_length=MAX_LABELS,
        description="Labels that the API key holds. A document with labels is seen by keys that hold at "
        "least one of them, and by admins; one without by every key of its namespace.",
    ),
]
GivenLabels = Annotated[
    DocumentLabels | None,
    Field(description="Labels, all of which the API key must hold. null: a document keeps those it has."),
]
OptionValue = bool | int | float | str


class ServerOptions(RequestOptions):
    """Options that every composed strategy takes over REST, and the engine does not see."""

    force: bool = Field(False, description="Answer though `ragserve tune` has not verified the strategy.")
    passages: PassagesOptions | None = Field(
        None,
        description="Compose the best passages alone: the options of strategy `passages`. The others are "
        "neither loaded nor moved.",
    )


_OPTION_MODELS = (
    *(
        create_model(model.__name__, __base__=(model, ServerOptions), __doc__=model.__doc__)
        for model in STRATEGY_OPTIONS.values()
    ),
    PassagesOptions,
)
StrategyOptions = Annotated[
    dict[str, OptionValue | dict[str, OptionValue]],
    # The models document the options; `StrategySpec.resolve` checks them once the strategy is known.
    BeforeValidator(lambda value: value, json_schema_input_type=Union[_OPTION_MODELS]),  # noqa: UP007
    Field(
        default_factory=dict,
        description="Options of the strategy. They are added to the server's own where the strategy "
        "is the server's.",
    ),
]


Prefill = Annotated[
    PrefillOptions,
    Field(
        default_factory=PrefillOptions,
        description="Options of sparse prefill that differ from the server's, with an exact strategy; needs "
        "`--sparse-attention on`.",
    ),
]


def _without_options(name: Any) -> Any:
    """Say where the options of a command line's strategy belong in a body."""
    if isinstance(name, str) and ":" in name:
        strategy, _, options = name.partition(":")
        raise ValueError(f"{strategy!r:.40} takes its options in strategy_options, not as {options!r:.200}")
    return name


NamedStrategy = Annotated[StrategyName, BeforeValidator(_without_options)]


class HistoryMessage(RequestModel):
    role: Literal["user", "assistant"]
    content: Annotated[Text, Field(max_length=65_536)]


class GivenDocument(RequestModel):
    """Context sent with the query instead of retrieved."""

    text: Annotated[NonBlank, Field(max_length=MAX_TEXT_CHARS)]
    title: Annotated[Text, Field(max_length=1024)] = ""
    source: Annotated[Text, Field(max_length=4096)] | None = Field(None, description="Returned in citations.")


DocumentsOverflow = Annotated[
    Overflow,
    Field(
        description="What becomes of `documents` that do not fit into the context. `refuse`: the request is "
        "refused with the sizes (`documents_too_long`). `drop`: the first that does not fit and all after "
        "it are left out. `cut`: the same, but the beginning of the first stays."
    ),
]


SessionName = Annotated[
    str,
    Field(
        pattern=r"^(new|[0-9a-f]{32})$",
        description="`new` begins a session, its id goes on with it: a dialogue that the server keeps, so "
        "that a turn sends its question only. Passages join those of earlier turns.",
    ),
]


SessionBudget = Annotated[
    int,
    Field(
        ge=0,
        description="Most tokens of the session's turns before the last one, from this turn on. Where they "
        "exceed it, the sentences stay that suit the question. 0: all stay. Default: that of the turn "
        "before; of the first turn, the server's.",
    ),
]


NamespaceNames = Annotated[
    list[Pattern],
    Field(
        min_length=1,
        max_length=MOST_NAMESPACES,
        description="Several namespaces, in place of `namespace`: names, and beginnings of names followed by "
        f"`*`, which match the namespaces that the API key may read. {MOST_NAMESPACES} at most, counted "
        "as matched.",
        examples=[["handbook", "docs-*"]],
    ),
]


class OneOrSeveral(RequestModel):
    """A body with ``namespace`` or ``namespaces``."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if {"namespace", "namespaces"} <= self.model_fields_set and self.__dict__["namespaces"] is not None:
            raise ValueError("give namespace or namespaces, not both")
        return self


class RetrieveRequest(SearchFields, OneOrSeveral):
    """A question, and where to search."""

    query: NonBlank = Field(description="The question. /info has its largest length, limits.max_query_chars.")
    namespace: Namespace = Field("default", description="Where to search.")
    namespaces: NamespaceNames | None = None
    history: list[HistoryMessage] = Field(
        default_factory=list,
        max_length=MAX_MESSAGES,
        description="Earlier turns, oldest first. The question is a follow-up then.",
    )


class QueryRequest(RetrieveRequest):
    """A question and how to answer it."""

    strategy: NamedStrategy | None = Field(
        None,
        description="Exact: `full`, `prefix`, and `passages`, which reads the best passages only. Composed "
        "from cached documents, approximate: `concat`, `epic`, `cacheblend`, `random`, `samkv`. `auto`: the "
        "verified strategy that should be fastest. Default: the server's, with its options.",
    )
    strategy_options: StrategyOptions
    decode: DecodeOptions = Field(
        default_factory=DecodeOptions,
        description="Decode options that differ from the server's; needs `--sparse-attention on`.",
    )
    prefill: Prefill
    stream: bool = Field(False, description="Answer with server-sent events.")
    max_new_tokens: int | None = Field(
        None, ge=1, le=32_768, description="Limit of the answer, tokens. Default: the server's."
    )
    temperature: float = Field(0.0, ge=0, le=2, description="0: greedy.")
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int | None = Field(
        None,
        ge=0,
        le=2**31 - 1,
        description="Makes sampling repeatable: the same request draws alike, as far as rounding lets it.",
    )
    stop: list[Stop] = Field(
        default_factory=list, max_length=16, description="Texts before which the answer ends."
    )
    system: Annotated[Text, Field(max_length=8192)] | None = Field(
        None, description="Replaces the system text."
    )
    documents: list[GivenDocument] | None = Field(
        None,
        max_length=MAX_DOCUMENTS,
        description="Context to use instead of retrieval, in order. Nothing is searched, and the namespace "
        "need not exist. Their KV is cached in memory under the namespace's name, never on disk.",
    )
    documents_overflow: DocumentsOverflow = "refuse"
    session: SessionName | None = None
    session_budget: SessionBudget | None = None


class InlineText(RequestModel):
    name: Annotated[NonBlank, Field(max_length=1024)] = Field(
        description="Identity of the document: a text of the same name replaces it."
    )
    text: Annotated[Text, Field(max_length=MAX_TEXT_CHARS)]
    title: Annotated[Text, Field(max_length=1024)] | None = None
    metadata: Metadata = Field(default_factory=dict)
    labels: GivenLabels = None


class IngestTexts(RequestModel):
    """Documents given as text."""

    namespace: Namespace = Field("default", description="Namespace, created if it does not exist.")
    texts: list[InlineText] = Field(min_length=1, max_length=1000)
    warm: bool = Field(False, description="Then compute their KV into the document cache, as a second job.")


class IngestUrls(RequestModel):
    """Documents to fetch. Addresses of this machine and its networks are refused (`url_ingestion`), behind
    redirects too; robots.txt is honoured (`robots`)."""

    namespace: Namespace = Field("default", description="Namespace, created if it does not exist.")
    urls: list[Annotated[Text, Field(max_length=2048)]] = Field(
        min_length=1,
        max_length=100,
        description="http and https URLs. That of a `sitemap.xml` stands for the pages that it names. Also "
        "s3://BUCKET/FOLDER and git+https://HOST/REPOSITORY#BRANCH:FOLDER where the server's owner allows "
        "them for this namespace (`client_sources`).",
    )
    sitemap: bool = Field(
        False,
        description="Take the pages that the sitemaps of each URL's site name: robots.txt, /sitemap.xml.",
    )
    other_hosts: bool = Field(False, description="Also take pages of a sitemap that are on other hosts.")
    prune: bool = Field(
        False,
        description="Remove documents whose file vanished from an S3 folder or a git repository. The key "
        "needs the right `delete`, too.",
    )
    metadata: Metadata = Field(default_factory=dict)
    labels: GivenLabels = None
    warm: bool = Field(False, description="Then compute their KV into the document cache, as a second job.")
