"""The viewer's JSON API."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request, Response
from pydantic import BaseModel, ConfigDict, StringConstraints, ValidationError
from starlette.responses import JSONResponse

from astuner.errors import RecordError, field_problems
from astuner.run_record.episode_file import RecordedEpisode
from astuner.run_record.episodes import answer_of
from astuner.run_record.files import dump_json
from astuner.run_record.jsonable import to_jsonable
from astuner.run_record.recorded_run import (
    RecordedRun,
    RunNote,
    config_difference,
    describe_result,
    result_difference,
    write_note,
)
from astuner.run_record.rescores import find_rescores, read_rescored_episodes
from astuner.schema import Split
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
from astuner.viewer.index import key_of, shorten
from astuner.viewer.logs import log_files, read_piece, search_log, tracebacks
from astuner.viewer.queries import EpisodeFilter, Order, failures, find_episodes, neighbours, task_picks, task_steps
from astuner.viewer.run_charts import rewards_by_step, training_results, validation_results, validations
from astuner.viewer.runs import IndexCache, RunList, findings_of
from astuner.viewer.token_texts import find_token_texts

# Integers that both SQLite and JavaScript represent exactly.
ExactInt = Annotated[int, Query(ge=-(2**53), le=2**53)]
Position = Annotated[int | None, Query(ge=0, le=2**53)]
# Largest number of episodes that are shown: side by side in a group, and in a rescored run.
_MAX_GROUP = 64
_MAX_RESCORED = 300
_MAX_NOTE_BYTES = 64 * 2**10


def add_routes(app: FastAPI, indexes: IndexCache) -> None:
    """Add the API to the server's application."""
    _add_run_routes(app, indexes)
    _add_list_routes(app, indexes)
    _add_task_routes(app, indexes)
    _add_episode_routes(app, indexes)
    _add_chart_routes(app, indexes)
    _add_log_routes(app, indexes)

    # The only route that writes; `RequestGuard` has checked its origin.
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
            return JSONResponse({"error": f"the note is not valid: {field_problems(error, 'body')[0]}"}, 422)
        written = RunNote(text=form.text.strip(), tags=tuple(dict.fromkeys(form.tags))[:50])
        write_note(indexes.runs.folder(run), written)
        return json_response(written.model_dump())


def json_response(value: object, status: int = 200) -> Response:
    """Return a response with a value as JSON."""
    try:
        data = dump_json(value)
    except (TypeError, ValueError, RecursionError):
        # The record holds values that JSON cannot represent, such as NaN or a date of a YAML file.
        data = dump_json(to_jsonable(value, lambda text: text))
    return Response(data, status, media_type="application/json")


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
        facts = RecordedRun(index.folder)
        summary = facts.summary and facts.summary.model_dump()
        findings = [asdict(finding) for finding in findings_of(index.folder)]
        about = {"name": run, "state": facts.state, "summary": summary, "findings": findings}
        return json_response(about | content)

    @app.get("/api/metrics")
    def metrics(run: str, after: ExactInt = 0, generation: str | None = None) -> Response:
        with indexes.of(run).reading() as db:
            return json_response(queries.metrics(db, after, generation or None))

    @app.get("/api/rescores")
    def rescores(run: str) -> Response:
        rows = [
            {
                "name": name, "judge": shorten(found.judge), "episodes": found.episodes, "changed": found.changed,
                "sign_flips": found.sign_flips, "kendall_tau": found.kendall_tau,
                "diverges": found.audit is not None and found.audit.diverges,
            }
            for name, found in find_rescores(indexes.runs.folder(run)).items()
        ]  # fmt: skip
        return json_response(rows)

    @app.get("/api/rescore")
    def rescore(run: str, name: str) -> Response:
        return json_response(_rescored_run(indexes.runs.folder(run), name))

    @app.get("/api/config")
    def config(run: Annotated[list[str], Query()]) -> Response:
        folders = {name: indexes.runs.folder(name) for name in run}
        configs = [RecordedRun(folder).config for folder in folders.values()]
        return json_response({"configs": configs, "differs": config_difference(folders)})


def _rescored_run(folder: Path, name: str) -> dict[str, Any]:
    """Return a rescored version of the run in `folder`, with the episodes whose rewards differ."""
    rescores = find_rescores(folder)
    if name not in rescores:
        raise RecordError(f"the run has no result of astuner rescore named {name[:80]!r}; there are {len(rescores)}")
    content = asdict(rescores[name])
    for row in (content["audit"] or {}).get("disagreements", ()):
        row["key"] = key_of(row["episode_id"])
    changed = [row for row in read_rescored_episodes(folder.absolute().parent / name) if row.is_changed]
    changed.sort(key=lambda row: (not row.flips_sign, -abs((row.reward or 0.0) - (row.reward_before or 0.0))))
    shown = [
        {
            "key": key_of(row.episode_id), "episode": shorten(row.episode_id), "step": row.step,
            "reward_before": row.reward_before, "reward": row.reward, "advantage_before": row.advantage_before,
            "advantage": row.advantage, "flips_sign": row.flips_sign,
            "explanation": shorten(row.error or (row.judgement.explanation if row.judgement else "")),
        }
        for row in changed[:_MAX_RESCORED]
    ]  # fmt: skip
    return {**content, "name": name, "changed_episodes": shown, "changed_total": len(changed)}


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
            path = _row(db, episode)["path"]
        return json_response({"answer": answer_of(read_episode_at(index.folder, path).episode)})


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


def _add_task_routes(app: FastAPI, indexes: IndexCache) -> None:
    @app.get("/api/group")
    def group(run: str, step: ExactInt, task: str, split: str = "train") -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            page = queries.episodes(db, EpisodeFilter(split=split, step=step, task=task), "reward", 0, _MAX_GROUP)
        for row in page["rows"]:
            try:
                recorded = read_episode_at(index.folder, row["path"])
                row["agents"] = by_agent(recorded.episode.calls, advantages_of_calls(recorded))
                row["transcript"] = transcript(recorded.episode)
            except (RecordError, RecursionError) as error:  # RecursionError: a message is nested too deeply for JSON.
                row |= {"transcript": [], "agents": [], "unreadable": str(error)}
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


def _add_episode_routes(app: FastAPI, indexes: IndexCache) -> None:
    @app.get("/api/episode")
    def episode(run: str, episode: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            row = _row(db, episode)
            around = {"neighbours": neighbours(db, row), "picks": task_picks(db, row["task_key"], row["split"])}
        recorded = read_episode_at(index.folder, row["path"])
        view = episode_view(recorded, find_token_texts(index.folder), RecordedRun(index.folder).config)
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
    return recorded, {
        "run": run,
        "row": row,
        "picks": picks,
        **episode_summary(recorded, RecordedRun(index.folder).config),
    }


def _add_chart_routes(app: FastAPI, indexes: IndexCache) -> None:
    @app.get("/api/charts")
    def charts(run: str) -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            return json_response({"rewards": index.cached(db, rewards_by_step), "validations": validations(db)})

    @app.get("/api/solve_rates")
    def solve_rates(run: str, split: Split = "train") -> Response:
        index = indexes.of(run)
        with index.reading() as db:
            return json_response(index.cached(db, training_results if split == "train" else validation_results))

    @app.get("/api/results")
    def results(run: Annotated[list[str], Query()]) -> Response:
        compared = [RecordedRun(indexes.runs.folder(name)) for name in run]
        differences = [result_difference(compared[0], other) for other in compared[1:]]
        return json_response({"rows": [describe_result(facts) for facts in compared], "differences": differences})


def _add_log_routes(app: FastAPI, indexes: IndexCache) -> None:
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


class _NoteForm(BaseModel):
    """A note as the page sends it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: Annotated[str, StringConstraints(max_length=10_000)]
    tags: list[Annotated[str, StringConstraints(min_length=1, max_length=60, strip_whitespace=True)]]
