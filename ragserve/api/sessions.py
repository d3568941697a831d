"""`/rag/sessions`: list and end the sessions of an API key."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path

from ragserve.answering.sessions.dialogues import Dialogue
from ragserve.api import examples
from ragserve.api.access import Caller
from ragserve.api.body import Text
from ragserve.api.openapi import documented
from ragserve.api.services import Svc
from ragserve.api.views import SessionList, SessionView

router = APIRouter(tags=["sessions"])
SessionId = Annotated[Text, Path(min_length=1, max_length=64, description="As in answers and listings.")]


@router.get(
    "/rag/sessions",
    summary="List sessions",
    response_model=SessionList,
    responses=documented(examples.SESSIONS, (503,), description="The API key's sessions"),
)
async def sessions(svc: Svc, caller: Caller) -> dict[str, Any]:
    """List the sessions that this API key has begun and that have not expired. Nobody else sees them."""
    return {
        "sessions": [
            _view(dialogue, expires_at) for dialogue, expires_at in svc.dialogues.of(caller.who.owner)
        ]
    }


@router.delete(
    "/rag/sessions/{session_id}",
    summary="End a session",
    response_model=SessionView,
    responses=documented(examples.SESSION, (400, 404, 503), description="What was ended"),
)
async def end(session_id: SessionId, svc: Svc, caller: Caller) -> SessionView:
    """Forget a session's texts, and its KV on the device. An answer under way is finished, and not added."""
    dialogue, expires_at = svc.dialogues.get(caller.who.owner, session_id)
    shown = _view(dialogue, expires_at)
    await svc.dialogues.end(dialogue)
    return shown


def _view(dialogue: Dialogue, expires_at: float) -> SessionView:
    return SessionView(
        id=dialogue.id,
        namespace=dialogue.namespace,
        strategy="" if dialogue.spec is None else dialogue.spec.label,
        turns=dialogue.turns,
        documents=len(dialogue.passages),
        tokens=len(dialogue.ids),
        created_at=dialogue.created_at,
        used_at=dialogue.used_at,
        expires_at=expires_at,
        outdated=dialogue.outdated,
    )
