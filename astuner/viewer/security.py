"""Protects the viewer against requests from other sites, and the browser against content in a record."""

from __future__ import annotations

from collections.abc import Collection

from loguru import logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.system.localhost import rejection_reason

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
# The only requests that write: notes and tags of runs.
_WRITING = frozenset({"/api/note"})


class RequestGuard:
    """Middleware that rejects requests of other sites and sets security headers."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward or reject a request. Unexpected errors are logged and returned as JSON."""
        if scope["type"] != "http":
            # `lifespan` has no headers; web sockets are not supported.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        rejection = self._rejection(scope["method"], scope["path"], Headers(scope=scope))
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        try:
            await (rejection or self._app)(scope, receive, send_with_headers)
        except Exception as error:  # A bug of the viewer; the server must continue.
            if has_started:
                raise
            logger.opt(exception=error).error("the viewer could not answer {}", scope["path"])
            message = f"internal error of the viewer ({type(error).__name__}: {error}); its terminal has the traceback"
            await JSONResponse({"error": message}, 500)(scope, receive, send_with_headers)

    def _rejection(self, method: str, path: str, headers: Headers) -> PlainTextResponse | None:
        if (reason := rejection_reason(headers, self._hosts)) is not None:
            return PlainTextResponse(f"{reason}\n", 403)
        if method in ("GET", "HEAD"):
            return None
        if method != "POST" or path not in _WRITING:
            return PlainTextResponse("This part of the viewer is read-only.\n", 405)
        # Forms of other sites can send requests, but not with this content type; browsers ask the server before scripts
        # do, and the server does not allow it. All browsers send the origin of such a request.
        if headers.get("content-type", "").split(";")[0].strip().lower() != "application/json":
            return PlainTextResponse("This request needs the content type application/json.\n", 415)
        if headers.get("origin") != f"http://{headers['host']}":
            return PlainTextResponse("This request needs the origin of the viewer's page.\n", 403)
        return None
