"""The API for the log page and for notes about runs."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from starlette.responses import JSONResponse

from astuner.run_record.run_facts import RunNote, write_note
from astuner.viewer.failures import failures
from astuner.viewer.logs import log_files, read_piece, search_log, tracebacks
from astuner.viewer.responses import json_response
from astuner.viewer.runs import IndexCache

Position = Annotated[int | None, Query(ge=0, le=2**53)]
_MAX_NOTE_BYTES = 64 * 2**10


class _NoteForm(BaseModel):
    """A note as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, StringConstraints(max_length=10_000)]
    tags: list[Annotated[str, StringConstraints(min_length=1, max_length=60, strip_whitespace=True)]]


def add_log_routes(app: FastAPI, indexes: IndexCache) -> None:
    """Add the routes about logs to the server's application."""

    @app.get("/api/logs")
    def logs(run: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            failed = index.cached(db, failures)["episodes"]
        return json_response({"files": log_files(index.folder), "failed": failed})

    @app.get("/api/log")
    def log(run: str, file: str, before: Position = None, after: Position = None) -> Response:
        return json_response(read_piece(indexes.runs.folder(run), file, before=before, after=after))

    @app.get("/api/log_search")
    def log_search(run: str, file: str, text: str, before: Position = None) -> Response:
        return json_response(search_log(indexes.runs.folder(run), file, text[:1000], before))

    @app.get("/api/tracebacks")
    def failed_tracebacks(run: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            groups = index.cached(db, failures)["groups"]
        return json_response(tracebacks(index.folder, groups))


def add_note_route(app: FastAPI, indexes: IndexCache) -> None:
    """Add the only route that writes: the note and the tags of a run. `RequestGuard` has checked its origin."""

    @app.post("/api/note")
    async def note(request: Request, run: str) -> Response:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > _MAX_NOTE_BYTES:
                return JSONResponse({"error": "the note is too long"}, 413)
        try:
            form = _NoteForm.model_validate_json(bytes(body))
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"]))
            return JSONResponse({"error": f"the note is not valid: {place or 'body'}: {first['msg']}"}, 422)
        written = RunNote(text=form.text.strip(), tags=tuple(dict.fromkeys(form.tags))[:50])
        write_note(indexes.runs.folder(run), written)
        return json_response(written.model_dump())
