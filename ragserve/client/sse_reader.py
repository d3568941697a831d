"""Read the server-sent events of a streamed query."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import cast

from ragserve import errors
from ragserve.answering.results import Answer, Citation, SearchResults
from ragserve.api.views import EVENTS, DoneEvent, MessageEvent
from ragserve.client.failures import error_of_body

QueryEvent = SearchResults | MessageEvent | Citation | Answer | DoneEvent
"""An event of a streamed query: the passages found, then pieces of the answer, its citations, the whole
answer, and the end."""


class EventReader:
    """Turns pieces of a stream, cut anywhere, into events."""

    def __init__(self) -> None:
        self._rest = b""
        self._done = False

    def feed(self, piece: bytes) -> Iterator[QueryEvent]:
        """Yield the events that are complete. Raises the error that the server sent."""
        # Only a blank line ends an event: a text may hold every other character that ends lines elsewhere.
        *complete, self._rest = (self._rest + piece).split(b"\n\n")
        for block in complete:
            fields = dict(_field(line) for line in block.split(b"\n"))
            name, data = fields.get(b"event", b"message").decode(), fields.get(b"data")
            if data is None or name not in EVENTS:
                continue  # a comment, or an event of a newer server
            if name == "error":
                raise error_of_body(json.loads(data), errors.RagserveError)
            self._done = name == "done"
            yield cast(QueryEvent, EVENTS[name].model_validate_json(data))

    def end(self, url: str) -> None:
        """Raise Unavailable if the stream of the server at ``url`` ended before the answer was complete."""
        if not self._done:
            raise errors.Unavailable(
                f"{url} closed the connection before the answer was complete.", hint="See the server's log."
            )


def _field(line: bytes) -> tuple[bytes, bytes]:
    name, _, value = line.partition(b":")
    return name, value.removeprefix(b" ")
