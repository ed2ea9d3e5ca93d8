"""The viewer's server: the page's static files, the JSON API, and protection against requests from other sites."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from os import PathLike, stat_result
from pathlib import Path

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from loguru import logger
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from astuner.errors import RecordError
from astuner.system.localhost import ADDRESS, listen, local_hosts, rejection_reason
from astuner.viewer.export import STATIC
from astuner.viewer.routes import add_routes, json_response
from astuner.viewer.runs import IndexCache, Runs

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


def serve(folder: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the runs of `folder` on 127.0.0.1 until Ctrl-C.

    Args:
        folder: A run's folder, or a folder with runs.
        port: 0 selects a free port.
        on_ready: Receives the page's URL before the server accepts requests.

    Raises:
        RecordError: If there is no such folder.
        ServiceError: If the port is taken.
    """
    indexes = IndexCache(Runs(folder))
    with listen(port) as listener:
        bound_port = listener.getsockname()[1]
        app = create_app(indexes, local_hosts(bound_port))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, server_header=False))
        on_ready(f"http://{ADDRESS}:{bound_port}/")
        try:
            server.run([listener])
        finally:
            indexes.close()


def create_app(indexes: IndexCache, hosts: Collection[str]) -> FastAPI:
    """Return the server's application; `hosts` are the accepted values of the `Host` header."""
    # FastAPI's documentation pages are disabled, because they load scripts from other sites.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestGuard, hosts=hosts)

    @app.exception_handler(RecordError)
    def record_error(_request: Request, error: RecordError) -> Response:
        return json_response({"error": str(error)}, 404)

    add_routes(app, indexes)
    # Serve the page at `/`, and its files under a path that contains a hash of their content.
    #
    # Browsers may therefore cache the files forever and fetch them again only for another version of astuner.
    digest = hashlib.sha256()
    for path in sorted(STATIC.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(STATIC).as_posix().encode() + b"\0" + path.read_bytes())
    version = digest.hexdigest()[:16]
    page = (STATIC / "index.html").read_text(encoding="utf-8").replace("{files}", version)

    @app.get("/")
    def index() -> HTMLResponse:
        return HTMLResponse(page)

    app.mount(f"/{version}", _ImmutableFiles(directory=STATIC))
    return app


class _ImmutableFiles(StaticFiles):
    """Static files that browsers may cache forever: the path contains a version that changes with the content."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a file with a header that lets browsers cache it forever."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


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
