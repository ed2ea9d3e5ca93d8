"""The page's own files, which a browser has to fetch only once."""

from __future__ import annotations

import hashlib
from os import PathLike, stat_result
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.responses import Response
from starlette.types import Scope

FOLDER = Path(__file__).parent / "static"


def add_static_files(app: FastAPI) -> None:
    """Have `app` answer with the page at `/`, and with its files under an address that their content gives.

    So the browser may keep them for good, and asks for them anew only where another version of astuner serves.
    """
    version = _version()
    page = (FOLDER / "index.html").read_text(encoding="utf-8").replace("{files}", version)

    @app.get("/")
    def index() -> HTMLResponse:
        return HTMLResponse(page)

    app.mount(f"/{version}", _KeptFiles(directory=FOLDER))


class _KeptFiles(StaticFiles):
    """Files that never change under their address."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a file, to be kept."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response


def _version() -> str:
    digest = hashlib.sha256()
    for path in sorted(FOLDER.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(FOLDER).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]
