"""Keeps other pages and other machines away from the viewer, and what a model wrote from running in the browser."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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
    """Refuses requests that were not made to this server by its own page; sets the headers that browsers obey.

    A foreign `Host` is what DNS rebinding looks like, a foreign `Origin` another site that asks from the browser.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] != "http":
            # `lifespan` has no headers; there are no web sockets.
            if scope["type"] == "lifespan":
                await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope["method"], Headers(scope=scope))

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-cache")
            await send(message)

        await (refusal or self._app)(scope, receive, with_headers)

    def _refusal(self, method: str, headers: Headers) -> PlainTextResponse | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            return PlainTextResponse("This page answers to its own address only.\n", 403)
        if origin is not None and origin != f"http://{host}":
            return PlainTextResponse("Another site may not ask this page.\n", 403)
        if headers.get("sec-fetch-site") in ("cross-site", "same-site") and headers.get("sec-fetch-mode") != "navigate":
            return PlainTextResponse("Another site may not ask this page.\n", 403)
        if method not in ("GET", "HEAD"):
            return PlainTextResponse("This page is read-only.\n", 405)
        return None


def own_hosts(port: int) -> list[str]:
    """Return the values of `Host` under which a server on this port is asked for locally."""
    return [f"{name}:{port}" for name in ("127.0.0.1", "localhost")]
