"""`/docs`: the OpenAPI document as a page. It loads nothing from other hosts, and asks for the API key, which
`/openapi.json` needs."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import HTMLResponse

PAGE = Path(__file__).with_name("docs_page.html")
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; script-src 'unsafe-inline'; "
    "style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
router = APIRouter()


@router.get("/docs", include_in_schema=False)
def docs() -> HTMLResponse:
    """Show the page, to anyone: it holds no more than the program's source."""
    return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=_HEADERS)
