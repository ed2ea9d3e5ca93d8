"""Keeps other pages and other machines away from the viewer, and what a model wrote from running in the browser."""

from __future__ import annotations

from collections.abc import Collection

from loguru import logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.loopback import why_foreign

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


class Guard:
    """Refuses requests that were not made to this server by its own page; sets the headers that browsers obey."""

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; what goes wrong with it is said in the log and in the answer."""
        if scope["type"] != "http":
            # `lifespan` has no headers; there are no web sockets.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], Headers(scope=scope))
        begun = False

        async def with_headers(message: Message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        try:
            await (refusal or self._app)(scope, receive, with_headers)
        # One answer that fails is no reason to end, and what fails here is a mistake of ours that nobody foresaw.
        except Exception as error:
            if begun:
                raise
            logger.opt(exception=error).error("the viewer could not answer {}", scope["path"])
            said = {
                "error": f"the viewer failed at this ({type(error).__name__}: {error}); where it runs, it says more"
            }
            await JSONResponse(said, 500)(scope, receive, with_headers)

    def _refusal(self, method: str, headers: Headers) -> PlainTextResponse | None:
        if (reason := why_foreign(headers, self._hosts)) is not None:
            return PlainTextResponse(f"{reason}\n", 403)
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read-only.\n", 405)
        return None
