"""The REST API's calls: how each request is built and its reply is read, for both clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, Generic, Literal, TypeVar, Unpack
from urllib.parse import quote

import httpx
from pydantic import BaseModel

from ragserve.answering.results import Answer
from ragserve.api.views import (
    ChunkList,
    ChunkView,
    DocumentList,
    DocumentView,
    Info,
    JobDetail,
    JobItemView,
    JobList,
    JobView,
    LostCorrections,
    LostCorrectionView,
    NamespaceList,
    NamespaceView,
    Preview,
    RatedAnswer,
    RatedAnswers,
    RetrieveAnswer,
    SessionList,
    SessionView,
    UnansweredQuestion,
    UnansweredQuestions,
)
from ragserve.client.arguments import (
    FileToIngest,
    IngestArguments,
    NamespaceArguments,
    QueryArguments,
    RetrieveArguments,
    TextDocument,
    WhereArguments,
)
from ragserve.errors import InvalidRequest
from ragserve.setting_groups.per_namespace import NamespaceSettings
from sglang_ext.wire.joint_names import names_of

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Upload = tuple[str, bytes | BinaryIO]
_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """A request and how its reply is read.

    ``options``: httpx's arguments. ``uploads`` opens the files to send, and closes them afterwards.
    ``repeatable``: asking twice does no more than asking once."""

    method: str
    path: str
    read: Callable[[httpx.Response], T]
    options: Mapping[str, Any] = field(default_factory=dict)
    uploads: Callable[[], AbstractContextManager[Sequence[Upload]]] | None = None
    repeatable: bool = False

    @contextmanager
    def sendable(self) -> Iterator[dict[str, Any]]:
        """Yield httpx's arguments, with files that are open during the block."""
        if self.uploads is None:
            yield dict(self.options)
        else:
            with self.uploads() as uploads:
                yield {**self.options, "files": [("files", upload) for upload in uploads]}


@dataclass(frozen=True, slots=True)
class Page(Generic[T]):
    """A part of a list; ``following`` is the call for the next one."""

    items: Sequence[T]
    following: Call[Page[T]] | None


def call(method: str, path: str, **options: Any) -> Call[Any]:
    """Make any request, with httpx's arguments. Its reply is the JSON; None for an empty one."""
    return Call(
        method,
        path,
        lambda response: response.json() if response.content else None,
        options,
        repeatable=method in ("GET", "HEAD"),
    )


def info() -> Call[Info]:
    """``GET /info``: versions, model, defaults and limits."""
    return _get("/info", _model(Info))


def query(question: str, **fields: Unpack[QueryArguments]) -> Call[Answer]:
    """``POST /rag/query``: the answer with its citations, token counts and timings."""
    return _asked(_model(Answer), question, fields)


def streamed_query(question: str, **fields: Unpack[QueryArguments]) -> Call[None]:
    """``POST /rag/query``, of which the events are read one by one."""
    return _asked(lambda response: None, question, {**fields, "stream": True})


def retrieve(question: str, **fields: Unpack[RetrieveArguments]) -> Call[RetrieveAnswer]:
    """``POST /rag/retrieve``: passages, best first, as a query would give them to the model."""
    return _post("/rag/retrieve", _model(RetrieveAnswer), {"query": question, **fields}, repeatable=True)


def ingest_texts(
    texts: Sequence[TextDocument], *, namespace: str | None = None, warm: bool | None = None
) -> Call[JobView]:
    """``POST /rag/ingest`` of texts. Returns the job; `wait` waits for it."""
    body = {"texts": [dict(text) for text in texts], "namespace": namespace, "warm": warm}
    return _post("/rag/ingest", _model(JobView), body)


def ingest_files(
    files: Sequence[FileToIngest], *, prechunked: bool | None = None, **fields: Unpack[IngestArguments]
) -> Call[JobView]:
    """``POST /rag/ingest`` of files; ``prechunked``: of JSON lines with a chunk each. Returns the job; `wait`
    waits for it."""
    return _form("/rag/ingest", JobView, files, {**fields, "prechunked": prechunked})


def preview(
    file: FileToIngest, *, chunk_tokens: int | None = None, limit: int | None = None
) -> Call[Preview]:
    """``POST /rag/ingest/preview``: how a file would be cut; nothing is stored. ``limit``: of chunks."""
    fields = {"chunk_tokens": chunk_tokens, "limit": limit}
    return replace(_form("/rag/ingest/preview", Preview, [file], fields), repeatable=True)


def _form(path: str, kind: type[M], files: Sequence[FileToIngest], fields: Mapping[str, Any]) -> Call[M]:

    @contextmanager
    def opened() -> Iterator[list[Upload]]:
        with ExitStack() as stack:
            uploads: list[Upload] = []
            for file in files:
                name, content = file if isinstance(file, tuple) else (Path(file).name, Path(file))
                _check_name(name)
                if isinstance(content, Path):
                    content = stack.enter_context(content.open("rb"))
                uploads.append((name, content))
            yield uploads

    data = {
        name: value if isinstance(value, str) else json.dumps(value) for name, value in _given(fields).items()
    }
    return Call("POST", path, _model(kind), {"data": data}, opened)


def _check_name(name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode("utf-8", "backslashreplace").decode()
        raise InvalidRequest(f"The name {shown} is not UTF-8.", hint="Rename it.", param="files") from error


def ingest_urls(
    urls: Sequence[str],
    *,
    sitemap: bool | None = None,
    other_hosts: bool | None = None,
    prune: bool | None = None,
    **fields: Unpack[IngestArguments],
) -> Call[JobView]:
    """``POST /rag/ingest`` of URLs, which the server fetches; with ``sitemap`` the pages that their sites'
    sitemaps name, with ``other_hosts`` also those elsewhere; with ``prune``, documents whose file vanished
    from an S3 folder or a git repository are removed. Returns the job, whose sources are the pages."""
    body = {"urls": list(urls), "sitemap": sitemap, "other_hosts": other_hosts, "prune": prune, **fields}
    return _post("/rag/ingest", _model(JobView), body)


def job(job_id: str) -> Call[JobDetail]:
    """``GET /rag/jobs/{job_id}``: the job, with the first of its sources."""
    return _get(_path("jobs", job_id), _model(JobDetail))


def jobs(
    *, namespace: str | None = None, state: str | None = None, limit: int | None = None
) -> Call[list[JobView]]:
    """``GET /rag/jobs``: the latest jobs, newest first."""
    listed = _model(JobList)
    return _get("/rag/jobs", lambda reply: listed(reply).jobs, namespace=namespace, state=state, limit=limit)


def job_items(job_id: str, *, state: str | None = None) -> Call[Page[JobItemView]]:
    """``GET /rag/jobs/{job_id}``: what became of each source."""
    return _pages(_path("jobs", job_id), JobDetail, lambda page: (page.items, page.next), {"state": state})


def cancel_job(job_id: str) -> Call[JobView]:
    """``DELETE /rag/jobs/{job_id}``: it ends after the source at hand."""
    return _delete(_path("jobs", job_id), JobView)


def warm(namespace: str | None = None, documents: Sequence[str] | None = None) -> Call[JobView]:
    """``POST /rag/cache/warm``: compute the KV of documents (doc_id or source; default: all). Returns the
    job."""
    body = {"namespace": namespace, "documents": None if documents is None else list(documents)}
    return _post("/rag/cache/warm", _model(JobView), body)


def documents(
    namespace: str | None = None,
    *,
    filter: Mapping[str, Any] | None = None,
    source_prefix: str | None = None,
) -> Call[Page[DocumentView]]:
    """``GET /rag/documents``: all of a namespace that match, ordered by doc_id."""
    chosen = None if filter is None else json.dumps(filter)
    params = {"namespace": namespace, "filter": chosen, "source_prefix": source_prefix}
    return _pages("/rag/documents", DocumentList, lambda page: (page.documents, page.next), params)


def document(doc_id: str, namespace: str | None = None) -> Call[DocumentView]:
    """``GET /rag/documents/{doc_id}``: a document's entry in the registry."""
    return _get(_path("documents", doc_id), _model(DocumentView), namespace=namespace)


def chunks(doc_id: str, namespace: str | None = None) -> Call[Page[ChunkView]]:
    """``GET /rag/documents/{doc_id}/chunks``: the pieces of a document that are searched, in its order."""
    path = _path("documents", doc_id, "chunks")
    return _pages(path, ChunkList, lambda page: (page.chunks, page.next), {"namespace": namespace})


def chunk(doc_id: str, ordinal: int, namespace: str | None = None) -> Call[ChunkView]:
    """``GET /rag/documents/{doc_id}/chunks/{ordinal}``: one of them."""
    path = _path("documents", doc_id, "chunks", str(ordinal))
    return _get(path, _model(ChunkView), namespace=namespace)


def change_chunk(
    doc_id: str,
    ordinal: int,
    version: str,
    *,
    text: str | None = None,
    disabled: bool | None = None,
    namespace: str | None = None,
) -> Call[ChunkView]:
    """``PATCH /rag/documents/{doc_id}/chunks/{ordinal}``: edit, disable or enable it, and return it as it is
    then. ``version``: of the chunk as it was read; of another one the server says Conflict."""
    path = _path("documents", doc_id, "chunks", str(ordinal))
    body = _given({"version": version, "text": text, "disabled": disabled})
    options = {"json": body, "params": _given({"namespace": namespace})}
    return Call("PATCH", path, _model(ChunkView), options)


def lost_corrections(doc_id: str, namespace: str | None = None) -> Call[list[LostCorrectionView]]:
    """``GET /rag/documents/{doc_id}/lost-corrections``: changes of chunks that the file no longer has."""
    listed = _model(LostCorrections)
    path = _path("documents", doc_id, "lost-corrections")
    return _get(path, lambda reply: listed(reply).lost, namespace=namespace)


def forget_lost_corrections(doc_id: str, namespace: str | None = None) -> Call[LostCorrections]:
    """``DELETE /rag/documents/{doc_id}/lost-corrections``: remove them for good."""
    return _delete(_path("documents", doc_id, "lost-corrections"), LostCorrections, namespace=namespace)


def remove_document(doc_id: str, namespace: str | None = None) -> Call[DocumentView]:
    """``DELETE /rag/documents/{doc_id}``: remove a document and its KV."""
    return _delete(_path("documents", doc_id), DocumentView, namespace=namespace)


def label_document(doc_id: str, labels: Sequence[str], namespace: str | None = None) -> Call[DocumentView]:
    """``PUT /rag/documents/{doc_id}/labels``: let the API keys see a document that hold one of these labels;
    without any, all keys of its namespace."""
    options = {"json": {"labels": list(labels)}, "params": _given({"namespace": namespace})}
    path = _path("documents", doc_id, "labels")
    return Call("PUT", path, _model(DocumentView), options, repeatable=True)


def namespaces() -> Call[list[NamespaceView]]:
    """``GET /rag/namespaces``: those that the API key covers, by name."""
    listed = _model(NamespaceList)
    return _get("/rag/namespaces", lambda reply: listed(reply).namespaces)


def namespace(name: str) -> Call[NamespaceView]:
    """``GET /rag/namespaces/{name}``: size, version and embedder."""
    return _get(_path("namespaces", name), _model(NamespaceView))


def drop_namespace(name: str) -> Call[NamespaceView]:
    """``DELETE /rag/namespaces/{name}``: delete all of its documents, at once and for good; its jobs
    are cancelled."""
    return _delete(_path("namespaces", name), NamespaceView)


def _get(path: str, read: Callable[[httpx.Response], T], **params: Any) -> Call[T]:
    return Call("GET", path, read, {"params": _given(params)}, repeatable=True)


def _pages(
    path: str, kind: type[M], split: Callable[[M], tuple[Sequence[T], Any]], params: Mapping[str, Any]
) -> Call[Page[T]]:
    def read(response: httpx.Response) -> Page[T]:
        items, after = split(_model(kind)(response))
        return Page(items, None if after is None else _pages(path, kind, split, {**params, "after": after}))

    return _get(path, read, limit=_PAGE, **params)


def _post(
    path: str, read: Callable[[httpx.Response], T], body: Mapping[str, Any], *, repeatable: bool = False
) -> Call[T]:
    return Call("POST", path, read, {"json": _given(body)}, repeatable=repeatable)


def _asked(read: Callable[[httpx.Response], T], question: str, fields: Mapping[str, Any]) -> Call[T]:
    """A query. One in a session is not repeatable: asking twice would begin two, or add two turns."""
    body = {"query": question, **fields}
    return _post("/rag/query", read, body, repeatable=fields.get("session") is None)


def _delete(path: str, kind: type[M], **params: Any) -> Call[M]:
    return Call("DELETE", path, _model(kind), {"params": _given(params)})


def _path(*parts: str) -> str:
    try:
        return "/rag/" + "/".join(quote(part, safe="") for part in parts)
    except UnicodeEncodeError as error:
        raise unsendable(error) from error


def unsendable(error: UnicodeEncodeError) -> InvalidRequest:
    """The error of a request with characters that have no bytes."""
    if error.encoding == "ascii":  # of headers; what they have is a secret
        return InvalidRequest("The API key has characters outside of ASCII.", param="api_key")
    part = error.object[max(0, error.start - 20) : error.end + 20]
    shown = part.encode("utf-8", "backslashreplace").decode()
    return InvalidRequest(
        f"The request has text that is not UTF-8: {shown}", hint="Decode it by its own encoding."
    )


def _model(kind: type[M]) -> Callable[[httpx.Response], M]:
    return lambda response: kind.model_validate_json(response.content)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def namespace_settings(name: str) -> Call[NamespaceSettings]:
    """``GET /rag/namespaces/{name}/settings``: the defaults of its queries; None: the server's."""
    return _get(_path("namespaces", name, "settings"), _model(NamespaceSettings))


def set_namespace_settings(name: str, **settings: Unpack[NamespaceArguments]) -> Call[NamespaceSettings]:
    """``PUT /rag/namespaces/{name}/settings``: replace all of them."""
    path = _path("namespaces", name, "settings")
    options = {"json": _given(settings)}
    return Call("PUT", path, _model(NamespaceSettings), options, repeatable=True)


def rate(answer: Answer, question: str, rating: Literal["up", "down"]) -> Call[RatedAnswers]:
    """``POST /rag/feedback``: keep a thumb up or down for an answer, if the server keeps feedback."""
    documents = [each.doc_id or each.source for each in answer.citations]
    body = {
        **where(answer.namespace),
        "rating": rating,
        "query": question,
        "answer": answer.answer,
        "documents": list(dict.fromkeys(name for name in documents if name)),
        "answer_id": answer.request_id,
    }
    return _post("/rag/feedback", _model(RatedAnswers), body, repeatable=True)


def where(name: str) -> WhereArguments:
    """The fields of a request for a namespace, or for several by their joint name or a pattern: ``a+b``,
    ``docs-*``."""
    names = names_of(name)
    if len(names) == 1 and not name.endswith("*"):
        return {"namespace": name}
    return {"namespaces": names}


def ratings(namespace: str) -> Call[list[RatedAnswer]]:
    """``GET /rag/feedback``: ratings, oldest first, as rows of ``ragserve eval``."""
    listed = _model(RatedAnswers)
    return _get("/rag/feedback", lambda reply: listed(reply).rows, namespace=namespace)


def unanswered(namespace: str) -> Call[list[UnansweredQuestion]]:
    """``GET /rag/unanswered``: what was asked and not found, newest first."""
    listed = _model(UnansweredQuestions)
    return _get("/rag/unanswered", lambda reply: listed(reply).questions, namespace=namespace)


def sessions() -> Call[list[SessionView]]:
    """``GET /rag/sessions``: those of the API key, oldest first."""
    listed = _model(SessionList)
    return _get("/rag/sessions", lambda reply: listed(reply).sessions)


def end_session(session_id: str) -> Call[SessionView]:
    """``DELETE /rag/sessions/{id}``: end it and free its KV."""
    return _delete(_path("sessions", session_id), SessionView)
