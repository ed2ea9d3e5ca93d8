"""The API for the episode pages: groups, episodes, comparisons, tasks over steps, and exports."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Response

from astuner.errors import RecordError
from astuner.run_record.episode_file import RecordedEpisode
from astuner.run_record.run_facts import config_of
from astuner.viewer import queries
from astuner.viewer.comparison import compare
from astuner.viewer.episode_view import (
    advantages_of_calls,
    by_agent,
    episode_summary,
    episode_view,
    read_episode_at,
    transcript,
)
from astuner.viewer.export import episode_page
from astuner.viewer.queries import EpisodeFilter
from astuner.viewer.responses import json_response
from astuner.viewer.runs import IndexCache
from astuner.viewer.task_queries import neighbours, task_picks, task_steps
from astuner.viewer.token_texts import find_token_texts

# Largest number of episodes of a group that are shown side by side.
_MAX_GROUP = 64


def add_episode_routes(app: FastAPI, indexes: IndexCache) -> None:
    """Add the routes to the server's application."""
    _add_task_routes(app, indexes)
    _add_single_routes(app, indexes)


def _add_task_routes(app: FastAPI, indexes: IndexCache) -> None:
    @app.get("/api/group")
    def group(
        run: str, step: Annotated[int, Query(ge=-(2**53), le=2**53)], task: str, split: str = "train"
    ) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            page = queries.episodes(db, EpisodeFilter(split=split, step=step, task=task), "reward", 0, _MAX_GROUP)
        for row in page["rows"]:
            row.update(_group_details(index.folder, row["path"]))
        return json_response(page)

    @app.get("/api/task")
    def task(run: str, task: str) -> Response:
        with indexes.of(run).reading() as db:
            picks_by_split = {split: task_picks(db, task, split) for split in ("val", "train")}
            return json_response({"steps": task_steps(db, task), "picks": picks_by_split})

    @app.get("/api/picks")
    def picks(run: str, task: str, split: str = "train") -> Response:
        with indexes.of(run).reading() as db:
            return json_response(task_picks(db, task, split))


def _add_single_routes(app: FastAPI, indexes: IndexCache) -> None:
    @app.get("/api/episode")
    def episode(run: str, episode: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            row = _row(db, episode)
            around = {
                "neighbours": neighbours(db, row),
                "picks": task_picks(db, row["task_key"], row["split"]),
            }
        recorded = read_episode_at(index.folder, row["path"])
        view = episode_view(recorded, find_token_texts(index.folder), config_of(index.folder))
        return json_response({"row": row, **around, **view})

    @app.get("/api/compare")
    def comparison(
        run: str,
        episode: str,
        other: Annotated[str, Query(alias="with")],
        other_run: Annotated[str | None, Query(alias="with_run")] = None,
    ) -> Response:
        left, left_side = _side(indexes, run, episode)
        right, right_side = _side(indexes, other_run or run, other)
        return json_response({"left": left_side, "right": right_side, **compare(left, right)})

    @app.get("/api/export")
    def export(run: str, episode: str, format: Literal["html", "json"] = "html") -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            path = _row(db, episode)["path"]
        if format == "html":
            content, media_type = episode_page(index.folder, path), "text/html; charset=utf-8"
        else:
            read_episode_at(index.folder, path)
            content, media_type = (index.folder / path).read_bytes(), "application/json"
        name = "".join(c if c.isascii() and (c.isalnum() or c in "._-") else "_" for c in Path(path).stem)
        disposition = f'attachment; filename="{name}.{format}"'
        return Response(content, media_type=media_type, headers={"Content-Disposition": disposition})


def _row(db: Any, key: str) -> dict[str, Any]:
    row = queries.episode_by_key(db, key)
    if row is None:
        raise RecordError(f"the run has no episode {key[:80]!r}; a resume of the run may have removed it")
    return row


def _side(indexes: IndexCache, run: str, key: str) -> tuple[RecordedEpisode, dict[str, Any]]:
    """Return an episode to compare, and the part of the page about it alone."""
    index = indexes.of(run)
    with index.reading() as db:
        row = _row(db, key)
        picks = task_picks(db, row["task_key"], row["split"])
    recorded = read_episode_at(index.folder, row["path"])
    return recorded, {"run": run, "row": row, "picks": picks, **episode_summary(recorded, config_of(index.folder))}


def _group_details(folder: Path, path: str) -> dict[str, Any]:
    """Return an episode's transcript and its agents' advantages, for its group's page."""
    try:
        recorded = read_episode_at(folder, path)
        agents = by_agent(recorded.episode.calls, advantages_of_calls(recorded))
        return {"transcript": transcript(recorded.episode), "agents": agents}
    except (RecordError, RecursionError) as error:  # RecursionError: a message is nested too deeply for JSON.
        return {"transcript": [], "agents": [], "unreadable": str(error)}
