"""The viewer's server: static files of the page and the JSON API. It writes only the notes of runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection
from dataclasses import asdict
from os import PathLike, stat_result
from pathlib import Path
from typing import Annotated, Any

import uvicorn
from fastapi import FastAPI, Query, Request, Response
from fastapi.responses import HTMLResponse
from fastapi.staticfiles import StaticFiles
from starlette.types import Scope

from astuner.errors import RecordError
from astuner.run_record.answers import answer_of
from astuner.run_record.run_facts import config_difference, config_of, run_state, summary_of
from astuner.system.localhost import ADDRESS, listen, local_hosts
from astuner.viewer import queries
from astuner.viewer.episode_routes import add_episode_routes
from astuner.viewer.episode_search import find_episodes
from astuner.viewer.episode_view import read_episode_at
from astuner.viewer.failures import failures
from astuner.viewer.log_routes import add_log_routes, add_note_route
from astuner.viewer.queries import EpisodeFilter, Order
from astuner.viewer.rescore_view import rescore_list, rescore_view
from astuner.viewer.responses import json_response
from astuner.viewer.run_charts import add_chart_routes
from astuner.viewer.runs import IndexCache, RunList, Runs, findings_of
from astuner.viewer.security import RequestGuard

_STATIC = Path(__file__).parent / "static"
# Integers that both SQLite and JavaScript represent exactly.
ExactInt = Annotated[int, Query(ge=-(2**53), le=2**53)]


def serve(folder: Path, port: int, on_ready: Callable[[str], None]) -> None:
    """Serve the runs of `folder` on 127.0.0.1 until Ctrl-C.

    Args:
        folder: The folder of a run, or a folder of runs.
        port: The port; 0 selects a free port.
        on_ready: Receives the URL of the page when the server accepts requests.

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
    """Return the server's application.

    Args:
        indexes: Indexes of the runs to show.
        hosts: Accepted values of the `Host` header.
    """
    # FastAPI's documentation pages are disabled, because they load scripts from other sites.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(RequestGuard, hosts=hosts)

    @app.exception_handler(RecordError)
    def record_error(_request: Request, error: RecordError) -> Response:
        return json_response({"error": str(error)}, 404)

    _add_run_routes(app, indexes)
    _add_list_routes(app, indexes)
    add_episode_routes(app, indexes)
    add_chart_routes(app, indexes)
    add_log_routes(app, indexes)
    add_note_route(app, indexes)
    _add_static_files(app)
    return app


def _add_run_routes(app: FastAPI, indexes: IndexCache) -> None:
    run_list = RunList(indexes)

    @app.get("/api/runs")
    def runs(metric: Annotated[list[str] | None, Query()] = None) -> Response:
        return json_response(run_list.rows(metric or ()))

    @app.get("/api/metric_names")
    def metric_names() -> Response:
        return json_response(run_list.metric_names())

    @app.get("/api/run")
    def run(run: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            content: dict[str, Any] = {"counts": queries.counts(db), "labels": queries.labels(db)}
            content["steps"] = index.cached(db, queries.steps)
            content["failures"] = index.cached(db, failures)
        summary = summary_of(index.folder)
        state = run_state(index.folder, summary)
        findings = [asdict(finding) for finding in findings_of(index.folder)]
        about = {"name": run, "state": state, "summary": summary and summary.model_dump(), "findings": findings}
        return json_response(about | content)

    @app.get("/api/metrics")
    def metrics(run: str, after: ExactInt = 0, generation: str | None = None) -> Response:
        with indexes.of(run).reading() as db:
            return json_response(queries.metrics(db, after, generation or None))

    @app.get("/api/rescores")
    def rescores(run: str) -> Response:
        return json_response(rescore_list(indexes.runs.folder(run)))

    @app.get("/api/rescore")
    def rescore(run: str, name: str) -> Response:
        return json_response(rescore_view(indexes.runs.folder(run), name))

    @app.get("/api/config")
    def config(run: Annotated[list[str], Query()]) -> Response:
        folders = {name: indexes.runs.folder(name) for name in run}
        configs = [config_of(folder) for folder in folders.values()]
        return json_response({"configs": configs, "differs": config_difference(folders)})


def _add_list_routes(app: FastAPI, indexes: IndexCache) -> None:
    @app.get("/api/groups")
    def groups(run: str, step: ExactInt, split: str = "train") -> Response:
        with indexes.of(run).reading() as db:
            return json_response(queries.groups(db, step, split))

    @app.get("/api/episodes")
    def episodes(
        request: Request,
        run: str,
        where: str | None = None,
        order: Order = "latest",
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        return json_response(find_episodes(indexes.of(run), _episode_filter(request), where, order, offset, limit))

    @app.get("/api/answer")
    def answer(run: str, episode: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            row = queries.episode_by_key(db, episode)
        if row is None:
            raise RecordError(f"the run has no episode {episode[:80]!r}; a resume of the run may have removed it")
        return json_response({"answer": answer_of(read_episode_at(index.folder, row["path"]).episode)})


def _episode_filter(request: Request) -> EpisodeFilter:
    query = request.query_params

    def number(name: str) -> float | None:
        """Return a number that a user typed; None, which does not filter, for anything else."""
        try:
            value = float(query.get(name) or "")
        except ValueError:
            return None
        return value if abs(value) < 1e18 else None

    names = ("split", "status", "task", "agent", "tag", "finish", "fork", "error", "failure", "text")
    texts: dict[str, Any] = {name: query[name] for name in names if query.get(name)}
    step = number("step")
    return EpisodeFilter(**texts, step=None if step is None else int(step), least=number("least"), most=number("most"))


def _add_static_files(app: FastAPI) -> None:
    """Serve the page at `/`, and its files under a path that contains a hash of their content.

    Browsers may therefore cache the files forever and fetch them again only for another version of astuner.
    """
    digest = hashlib.sha256()
    for path in sorted(_STATIC.rglob("*")):
        if path.is_file():
            digest.update(path.relative_to(_STATIC).as_posix().encode() + b"\0" + path.read_bytes())
    version = digest.hexdigest()[:16]
    page = (_STATIC / "index.html").read_text(encoding="utf-8").replace("{files}", version)

    @app.get("/")
    def index() -> HTMLResponse:
        return HTMLResponse(page)

    app.mount(f"/{version}", _ImmutableFiles(directory=_STATIC))


class _ImmutableFiles(StaticFiles):
    """Static files that browsers may cache forever: the path contains a version that changes with the content."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        """Return a file with a header that lets browsers cache it forever."""
        response = super().file_response(full_path, stat_result, scope, status_code)
        response.headers["Cache-Control"] = "public, max-age=31536000, immutable"
        return response
