"""`/sso/...`: sign-in of the playground by OpenID Connect."""

from __future__ import annotations

from html import escape
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from ragserve.errors import Forbidden, RagserveError, Unauthorized
from ragserve.sso.single_sign_on import SIGN_IN_S, SingleSignOn

ROUTES = ("GET /sso/session", "GET /sso/login", "GET /sso/callback", "POST /sso/logout")
PATHS = frozenset(route.partition(" ")[2] for route in ROUTES)
"""Everybody may call them: they make the sign-in."""

_HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",  # the callback's address has the code
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
}
_Text = Annotated[str, Query(max_length=4096)]
router = APIRouter(include_in_schema=False)


@router.get("/sso/session")
async def session(request: Request) -> JSONResponse:
    """Say whether there is a sign-in here, and who is signed in at this browser."""
    sso = _sso(request)
    who = None
    if sso.signs_in:
        cookie = request.cookies.get(sso.session_cookie, "")
        who = sso.signed_in(cookie, request.headers.get("origin"), request.headers.get("sec-fetch-site"))
    body = {"sign_in": sso.signs_in, "user": None if who is None else who.name}
    return JSONResponse(body, headers=_HEADERS)


@router.get("/sso/login")
async def login(request: Request) -> Response:
    """Lead the browser to the provider."""
    sso = _sso(request)
    try:
        there, kept = await sso.begin()
    except RagserveError as error:
        return _page(request, error)
    answer = RedirectResponse(there, 303, headers=_HEADERS)
    # Lax: the provider leads back here from a page of its own
    _keep(answer, sso, sso.sign_in_cookie, kept, SIGN_IN_S, "lax")
    return answer


@router.get("/sso/callback")
async def callback(
    request: Request, state: _Text = "", code: _Text = "", error: Annotated[str, Query(max_length=256)] = ""
) -> Response:
    """Take the browser back from the provider, signed in."""
    sso = _sso(request)
    try:
        if error or not code:
            known = error.isascii() and error.replace("_", "").isalnum()  # the codes of OAuth
            said = f"The provider says {error[:64]}." if known else "The provider sent no code."
            raise Unauthorized(said, hint="Sign in again.", code="sign_in_failed")
        cookie = await sso.finish(state, code, request.cookies.get(getattr(sso, "sign_in_cookie", ""), ""))
    except RagserveError as failed:
        return _page(request, failed)
    answer = RedirectResponse("../playground", 303, headers=_HEADERS)
    _keep(answer, sso, sso.session_cookie, cookie, None, "strict")
    _drop(answer, sso, sso.sign_in_cookie)
    return answer


@router.post("/sso/logout")
async def logout(request: Request) -> JSONResponse:
    """Sign this browser out, and say where it goes then."""
    sso = _sso(request)
    sso.require()
    if not sso.own_page(request.headers.get("origin"), request.headers.get("sec-fetch-site")):
        raise Forbidden("Other pages cannot sign anybody out.", code="origin_not_allowed")
    answer = JSONResponse({"go_to": await sso.after_sign_out()}, headers=_HEADERS)
    _drop(answer, sso, sso.session_cookie)
    return answer


def _sso(request: Request) -> SingleSignOn:
    found: SingleSignOn = request.app.state.sso
    return found


def _keep(answer: Response, sso: SingleSignOn, name: str, value: str, seconds: int | None, site: Any) -> None:
    """Have the browser keep a cookie: out of reach for scripts, until it is closed unless ``seconds`` say."""
    answer.set_cookie(name, value, max_age=seconds, path="/", secure=sso.secure, httponly=True, samesite=site)


def _drop(answer: Response, sso: SingleSignOn, name: str) -> None:
    answer.delete_cookie(name, path="/", secure=sso.secure, httponly=True, samesite="strict")


def _page(request: Request, error: RagserveError) -> HTMLResponse:
    """A page for a person at a browser; raises the error for a program."""
    if "text/html" not in request.headers.get("accept", ""):
        raise error
    head = "<!doctype html><title>Sign-in failed</title>"
    text = f'{head}<p>{escape(str(error))}</p><p><a href="../playground">Back</a></p>'
    return HTMLResponse(text, error.status, headers=_HEADERS)
