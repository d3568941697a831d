"""A server of embeddings and scores on a real socket, which a test makes wrong, slow or dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from tests.unit.api.scripted_server import running
from tests.unit.api.word_embedder import WordEmbedder

Reply = Callable[[str, dict[str, Any]], Any]


@dataclass
class Remote:
    """``reply`` makes the answer of a path and a body: JSON, or a response; ``seen`` are the requests."""

    url: str = ""
    reply: Reply = field(default=lambda path, body: right(path, body))
    delay_s: float = 0.0
    seen: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    left: int = 0  # clients that did not wait for the answer

    def reset(self) -> None:
        self.reply, self.delay_s, self.left = right, 0.0, 0
        self.seen.clear()

    async def answer(self, request: Request) -> Response:
        body = await request.json()
        self.seen.append((request.url.path, body, dict(request.headers)))
        waited = 0.0
        while waited < self.delay_s:
            if await request.is_disconnected():
                self.left += 1
                break
            await asyncio.sleep(0.02)
            waited += 0.02
        answer = self.reply(request.url.path, body)
        return answer if isinstance(answer, Response) else JSONResponse(answer)


def right(path: str, body: dict[str, Any]) -> Any:
    """The right answer, in an order of its own."""
    if path.endswith("/embeddings"):
        vectors = WordEmbedder().encode(body["input"])
        rows = [{"object": "embedding", "index": i, "embedding": v.tolist()} for i, v in enumerate(vectors)]
        return {"object": "list", "data": rows[::-1], "model": body["model"]}
    words = set(body["query"].lower().split())
    texts = body.get("documents", body.get("texts"))
    scores = [len(words & set(text.lower().split())) / 10 for text in texts]
    best = sorted(range(len(texts)), key=lambda i: -scores[i])
    if "texts" in body:
        return [{"index": i, "score": scores[i]} for i in best]
    return {"id": "1", "results": [{"index": i, "relevance_score": scores[i]} for i in best]}


@contextmanager
def remote_server() -> Iterator[Remote]:
    """A server until the block ends."""
    remote = Remote()
    app = Starlette(routes=[Route("/{path:path}", remote.answer, methods=["POST"])])
    with running(app) as url:
        remote.url = url
        yield remote
