"""`/v1/embeddings`, `/v1/rerank` and `/rerank`: the server's embedder and CrossEncoders, by name.

Other models are SGLang's. These routes read no document. A key needs the right to read in some namespace, as
for every route that runs a model."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, BeforeValidator, Field

from ragserve.api import examples
from ragserve.api.access import Access, Caller
from ragserve.api.body import MAX_NAMES, NonBlank, RequestModel, Text, parse_json
from ragserve.api.errors import validated
from ragserve.api.openai import without_retrieval
from ragserve.api.openapi import documented
from ragserve.api.services import RequestId, Services, services
from ragserve.api.sse import until_disconnect
from ragserve.errors import InvalidRequest, NotFound, TooLarge
from ragserve.retrieval.reranker import CrossEncoderReranker

MAX_INPUTS = 2048
MAX_DOCUMENTS = 1000
MAX_INPUT_CHARS = 65_536
MAX_CHARS = 2**20
"""Of all texts of a request; a query counts once for each document."""

M = TypeVar("M", bound=BaseModel)
router = APIRouter(tags=["models"])


def _texts(value: Any) -> Any:
    """A list of texts. Says one sentence about token ids, not one for each."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list):
        raise ValueError("must be a text or a list of texts")
    if any(isinstance(each, (int, list)) for each in texts):
        raise ValueError(
            "is read as text, not as token ids: send texts (LangChain: check_embedding_ctx_length=False)"
        )
    return texts


def _document(value: Any) -> Any:
    return value["text"] if isinstance(value, dict) and value.keys() == {"text"} else value


Input = Annotated[NonBlank, Field(max_length=MAX_INPUT_CHARS)]
Document = Annotated[Text, Field(max_length=MAX_INPUT_CHARS), BeforeValidator(_document)]


class EmbeddingRequest(RequestModel):
    """Texts to embed, as OpenAI's API has it."""

    model: str = Field(description="The server's embedder, see `/info`.", examples=["all-MiniLM-L6-v2"])
    input: Annotated[
        list[Input],
        Field(min_length=1, max_length=MAX_INPUTS),
        BeforeValidator(_texts, json_schema_input_type=str | list[str]),
    ] = Field(description="A text, or several; no token ids.")
    encoding_format: Literal["float", "base64"] | None = Field(
        None, description="`base64`: float32, little-endian. Default: `float`."
    )
    dimensions: int | None = Field(None, description="Only the model's own number is served.")
    input_type: Literal["query", "document", "passage"] | None = Field(
        None, description="Puts the model's prompt for questions or passages before each text."
    )
    user: Any = Field(None, description="Accepted and ignored.")


class RerankRequest(RequestModel):
    """Documents to score, as Cohere's API has it."""

    model: str = Field(description="A CrossEncoder of the server's settings.")
    query: Input
    documents: list[Document] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    top_n: int | None = Field(None, ge=1, description="Most results. Default: all.")
    return_documents: bool | None = Field(None, description="Return the texts, too.")


class TeiRerankRequest(RequestModel):
    """Texts to score, as Text Embeddings Inference has it. The model is the server's `rerank`."""

    query: Input
    texts: list[Document] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    raw_scores: Literal[False] | None = Field(None, description="Scores are as the model gives them.")
    return_text: bool | None = Field(None, description="Return the texts, too.")
    truncate: bool | None = Field(None, description="Accepted: a text is read as far as the model reads.")
    truncation_direction: Literal["right", "Right"] | None = None


class Embedding(BaseModel):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(BaseModel):
    prompt_tokens: int
    total_tokens: int


class EmbeddingAnswer(BaseModel):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class RerankedText(BaseModel):
    text: str


class RerankResult(BaseModel):
    index: int = Field(description="Place of the document in the request, from 0.")
    relevance_score: float = Field(description="The model's score; higher is better.")
    document: RerankedText | None = None


class RerankAnswer(BaseModel):
    id: str
    model: str
    results: list[RerankResult] = Field(description="Best first.")
    meta: dict[str, Any]


class TeiResult(BaseModel):
    index: int
    score: float
    text: str | None = None


BODIES: list[type[BaseModel]] = [EmbeddingRequest, RerankRequest, TeiRerankRequest]
_STATUSES = (400, 404, 413, 429, 502, 503)


def _body(model: type[BaseModel], example: dict[str, Any]) -> dict[str, Any]:
    schema = {"$ref": f"#/components/schemas/{model.__name__}"}
    return {
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": schema, "example": example}},
        }
    }


@router.post(
    "/v1/embeddings",
    summary="Embed texts, as OpenAI's API",
    response_model=EmbeddingAnswer,
    responses=documented(examples.EMBEDDINGS, _STATUSES, description="The vectors", passes_on=True),
    openapi_extra=_body(EmbeddingRequest, examples.EMBEDDING_REQUEST),
)
async def embeddings(request: Request, caller: Caller) -> Response:
    """Embed texts with the server's embedder, L2-normalised; a text longer than the model reads in windows,
    whose mean it is. Requests for other models go to SGLang."""
    svc, data = await _read(request)
    embedder = svc.served.embedder(_named(data) or "")
    if embedder is None:
        return await _passed_on(request, caller, svc.served.embedders, "embedder")
    body = await _checked(EmbeddingRequest, data, request, svc)
    _check_chars(body.input)
    if body.dimensions not in (None, embedder.dim):
        raise InvalidRequest(
            f"dimensions is {body.dimensions}; {embedder.model} gives vectors of {embedder.dim}.",
            hint="Omit it.",
            param="dimensions",
        )
    side: Literal["query", "document"] | None = (
        "document" if body.input_type == "passage" else body.input_type
    )
    spent = _Spent(caller)
    with svc.limiter.slot():
        work = svc.served.embed(embedder, body.input, side, spent)
        vectors = await until_disconnect(request, work)

    def encoded() -> bytes:
        encode: Callable[[np.ndarray], Any] = _base64 if body.encoding_format == "base64" else _floats
        rows = [{"object": "embedding", "index": i, "embedding": encode(v)} for i, v in enumerate(vectors)]
        usage = {"prompt_tokens": spent.tokens, "total_tokens": spent.tokens}
        return _json({"object": "list", "data": rows, "model": embedder.model, "usage": usage})

    return Response(await asyncio.to_thread(encoded), media_type="application/json")


async def rerank(request: Request, caller: Caller, request_id: RequestId) -> Response:
    """Score documents for a query with a CrossEncoder of the server's settings `rerank` or `rerank_models`;
    each is read as far as the model reads. Requests for other models go to SGLang."""
    svc, data = await _read(request)
    name = _named(data)
    reranker = None if name is None else svc.served.reranker(name)
    if reranker is None:
        return await _passed_on(request, caller, svc.served.rerankers, "reranker")
    body = await _checked(RerankRequest, data, request, svc)
    scores, spent = await _scores(request, caller, svc, reranker, body.query, body.documents)
    results = [
        {"index": index, "relevance_score": scores[index]}
        | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
        for index in _best(scores)[: body.top_n]
    ]
    meta = {"api_version": {"version": "2"}, "tokens": {"input_tokens": spent.tokens}}
    answer = {"id": request_id, "model": reranker.name, "results": results, "meta": meta}
    return Response(_json(answer), media_type="application/json")


for _path in ("/v1/rerank", "/v2/rerank"):
    router.add_api_route(
        _path,
        rerank,
        methods=["POST"],
        summary="Score documents for a query, as Cohere's API",
        response_model=RerankAnswer,
        responses=documented(
            examples.RERANKED, _STATUSES, description="Documents, best first", passes_on=True
        ),
        openapi_extra=_body(RerankRequest, examples.RERANK_REQUEST),
        include_in_schema=_path == "/v1/rerank",
    )


@router.post(
    "/rerank",
    summary="Score texts for a query, as Text Embeddings Inference",
    response_model=list[TeiResult],
    responses=documented(examples.TEI_RERANKED, (400, 404, 413, 429, 503), description="Texts, best first"),
    openapi_extra=_body(TeiRerankRequest, examples.TEI_RERANK_REQUEST),
)
async def tei_rerank(request: Request, caller: Caller) -> Response:
    """Score texts with the CrossEncoder of the setting `rerank`, or the only one of `rerank_models`."""
    svc, data = await _read(request)
    reranker = svc.served.reranker(None)
    if reranker is None:
        raise _not_served("This server has no reranker of its own to serve here.", svc.served.rerankers)
    body = await _checked(TeiRerankRequest, data, request, svc)
    scores, _ = await _scores(request, caller, svc, reranker, body.query, body.texts)
    results = [
        {"index": index, "score": scores[index]} | ({"text": body.texts[index]} if body.return_text else {})
        for index in _best(scores)
    ]
    return Response(_json(results), media_type="application/json")


class _Spent:
    """Counts the tokens of a request, against its key's rate as well."""

    def __init__(self, caller: Access) -> None:
        caller.check_tokens()
        self._caller = caller
        self.tokens = 0

    def __call__(self, tokens: int) -> None:
        self.tokens += tokens
        self._caller.spend(tokens)


async def _read(request: Request) -> tuple[Services, Any]:
    data = await parse_json(await request.body(), MAX_NAMES)
    if not isinstance(data, dict):
        raise InvalidRequest("The body must be a JSON object.", hint="See /docs for its fields.")
    return await services(request), data


def _named(data: dict[str, Any]) -> str | None:
    model = data.get("model")
    return model if isinstance(model, str) else None


async def _checked(model: type[M], data: Any, request: Request, svc: Services) -> M:
    limit = svc.settings.max_body_bytes
    if len(await request.body()) > limit:
        raise TooLarge(
            f"The request's body is over {limit:,} bytes.", hint="Send less, or raise max_body_bytes."
        )
    return validated(model, data)


async def _passed_on(request: Request, caller: Access, served: Sequence[str], kind: str) -> Response:
    try:
        return await without_retrieval(request, caller)
    except NotFound as error:
        if error.code != "model_not_found":
            raise
        raise _not_served(f"{error.message} It is no {kind} of this server.", served) from None


def _not_served(message: str, served: Sequence[str]) -> NotFound:
    return NotFound(
        message,
        hint=f"Here: {', '.join(served)}." if served else "A remote one is asked where it is.",
        code="model_not_found",
        param="model",
    )


async def _scores(
    request: Request,
    caller: Access,
    svc: Services,
    reranker: CrossEncoderReranker,
    query: str,
    texts: Sequence[str],
) -> tuple[list[float], _Spent]:
    _check_chars(texts, len(texts) * len(query))
    spent = _Spent(caller)
    with svc.limiter.slot():
        return await until_disconnect(request, svc.served.score(reranker, query, texts, spent)), spent


def _check_chars(texts: Sequence[str], more: int = 0) -> None:
    chars = sum(map(len, texts)) + more
    if chars > MAX_CHARS:
        raise TooLarge(
            f"The texts have {chars:,} characters; the limit of a request is {MAX_CHARS:,}.",
            hint="Send fewer texts at a time.",
        )


def _best(scores: Sequence[float]) -> list[int]:
    return sorted(range(len(scores)), key=lambda index: -scores[index])


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def _floats(vector: np.ndarray) -> list[float]:
    found: list[float] = vector.tolist()
    return found


def _json(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
