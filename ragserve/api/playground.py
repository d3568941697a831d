"""`/playground`: a page to add documents and to compare answers. It loads nothing from other hosts, and asks
for the API key, which the routes that it calls need."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, RedirectResponse, Response

FOLDER = Path(__file__).with_name("playground_page")
_TYPES = {".css": "text/css", ".html": "text/html", ".js": "text/javascript", ".svg": "image/svg+xml"}
_FILES = {
    "/playground" if path.name == "index.html" else f"/playground/{path.name}": path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in _TYPES
}
PATHS = frozenset(_FILES)
"""The page and its files. Everybody may read them: they hold no more than the program's source."""
_HEADERS = {
    # No inline script or style. Where browsers know trusted types, no text becomes markup either.
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'; require-trusted-types-for 'script'",
    "Cache-Control": "no-cache",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
router = APIRouter()


@router.get("/", include_in_schema=False)
def start_page() -> RedirectResponse:
    """Lead to the playground, below whatever path a proxy serves us at."""
    return RedirectResponse("playground", headers={"Cache-Control": "no-cache"})


@router.head("/", include_in_schema=False)
def is_there() -> Response:
    """Answer clients of Ollama's API, which ask this way whether a server is there."""
    return Response()


def _serve(path: Path) -> FileResponse:
    return FileResponse(path, media_type=_TYPES[path.suffix], headers=_HEADERS)


def _add(route: str, path: Path) -> None:
    router.add_api_route(route, lambda: _serve(path), include_in_schema=False)


for _route, _path in _FILES.items():
    _add(_route, _path)
