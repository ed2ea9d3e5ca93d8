"""The viewer's server: the page's files, and the answers that it asks for as JSON. It only reads."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Any

from fastapi import FastAPI, Query, Request, Response

from astuner.errors import RecordError
from astuner.run_record.files import dump_json
from astuner.run_record.plain import to_plain
from astuner.viewer import queries
from astuner.viewer.advantages import advantages_of_calls, by_agent
from astuner.viewer.episode_view import episode_view, read_episode_at
from astuner.viewer.guard import Guard
from astuner.viewer.indexes import Indexes
from astuner.viewer.queries import EpisodeFilter, Order
from astuner.viewer.run_list import RunList
from astuner.viewer.runs import config_difference, config_of, run_state, summary_of
from astuner.viewer.static_files import add_static_files
from astuner.viewer.token_texts import find_token_texts
from astuner.viewer.transcript import transcript

_MOST_BESIDE = 64
# What the database and a browser hold exactly.
Whole = Annotated[int, Query(ge=-(2**53), le=2**53)]


def create_app(indexes: Indexes, hosts: Collection[str]) -> FastAPI:
    """Return the server's application.

    Args:
        indexes: of the runs to show.
        hosts: the values of `Host` that are answered.
    """
    # Without FastAPI's own pages: they load scripts from elsewhere.
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Guard, hosts=hosts)

    @app.exception_handler(RecordError)
    def cannot_read(_request: Request, error: RecordError) -> Response:
        return _answer({"error": str(error)}, 404)

    _add_run_answers(app, indexes)
    _add_episode_answers(app, indexes)
    add_static_files(app)
    return app


def _add_run_answers(app: FastAPI, indexes: Indexes) -> None:
    listed = RunList(indexes)

    @app.get("/api/runs")
    def runs() -> Response:
        return _answer(listed.rows())

    @app.get("/api/run")
    def run(run: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            found = {"counts": queries.counts(db), "steps": index.steps(db), "labels": queries.labels(db)}
        return _answer({"name": run, "state": run_state(index.folder), "summary": summary_of(index.folder), **found})

    @app.get("/api/metrics")
    def metrics(run: str, after: Whole = 0, generation: str | None = None) -> Response:
        with indexes.of(run).reading() as db:
            return _answer(queries.metrics(db, after, generation or None))

    @app.get("/api/config")
    def config(run: Annotated[list[str], Query()]) -> Response:
        folders = {name: indexes.runs.folder(name) for name in run}
        return _answer({"configs": [config_of(f) for f in folders.values()], "differs": config_difference(folders)})


def _add_episode_answers(app: FastAPI, indexes: Indexes) -> None:
    @app.get("/api/groups")
    def groups(run: str, step: Whole, split: str = "train") -> Response:
        with indexes.of(run).reading() as db:
            return _answer(queries.groups(db, step, split))

    @app.get("/api/episodes")
    def episodes(
        request: Request,
        run: str,
        order: Order = "latest",
        offset: Annotated[int, Query(ge=0, le=2**53)] = 0,
        limit: Annotated[int, Query(ge=1, le=500)] = 100,
    ) -> Response:
        with indexes.of(run).reading() as db:
            return _answer(queries.episodes(db, _filter(request), order, offset, limit))

    @app.get("/api/group")
    def group(run: str, step: Whole, task: str, split: str = "train") -> Response:
        index = indexes.of(run)
        wanted = EpisodeFilter(split=split, step=step, task=task)
        with index.reading() as db:
            found = queries.episodes(db, wanted, "reward", 0, _MOST_BESIDE)
        for row in found["rows"]:
            row.update(_beside(index.folder, row["path"]))
        return _answer(found)

    @app.get("/api/episode")
    def episode(run: str, episode: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            row = queries.episode_by_key(db, episode)
        if row is None:
            raise RecordError(
                f"the run has no episode {episode[:80]!r}; it may have been removed as the run was resumed"
            )
        recorded = read_episode_at(index.folder, row["path"])
        return _answer({"row": row, **episode_view(recorded, find_token_texts(index.folder))})


def _beside(folder: Path, path: str) -> dict[str, Any]:
    """Return what the group's page shows of an episode beside its row."""
    try:
        recorded = read_episode_at(folder, path)
        agents = by_agent(recorded.episode.calls, advantages_of_calls(recorded))
        return {"transcript": transcript(recorded.episode), "agents": agents}
    # The second: a message too deeply nested to be written out.
    except (RecordError, RecursionError) as error:
        return {"transcript": [], "agents": [], "unreadable": str(error)}


def _filter(request: Request) -> EpisodeFilter:
    asked = request.query_params
    texts = {
        name: asked[name]
        for name in ("split", "status", "task", "agent", "tag", "finish", "fork", "error", "text")
        if asked.get(name)
    }
    return EpisodeFilter(
        **texts, step=_whole(asked.get("step")), least=_real(asked.get("least")), most=_real(asked.get("most"))
    )


def _whole(text: str | None) -> int | None:
    number = _real(text)
    return None if number is None else int(number)


def _real(text: str | None) -> float | None:
    """Return a number that was typed into a filter; None, which does not filter, for anything else."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if abs(number) < 1e18 else None


def _answer(value: object, status: int = 200) -> Response:
    try:
        data = dump_json(value)
    except (TypeError, ValueError, RecursionError):
        # A record holds what JSON has not, such as NaN or a date of a YAML file.
        data = dump_json(to_plain(value, lambda text: text))
    return Response(data, status, media_type="application/json")
