"""Pages in the episode list, with a search in the episodes' texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from astuner.viewer import queries
from astuner.viewer.episode_texts import KINDS
from astuner.viewer.index import RunIndex
from astuner.viewer.queries import EpisodeFilter, Order
from astuner.viewer.text_query import parse_query


def find_episodes(
    index: RunIndex, matching: EpisodeFilter, kind: str | None, order: Order, offset: int, limit: int
) -> dict[str, Any]:
    """Return a page of the matching episodes. Also starts to read the texts of new episodes for later searches.

    Args:
        index: The run's index.
        matching: The conditions. Its `text` is a query of the text search; see `parse_query`.
        kind: Kind of the texts to search; anything but one of `KINDS` also searches ids and queries of tasks.
        order: Order of the episodes.
        offset: Number of episodes before the page.
        limit: Largest number of episodes on the page.

    Returns:
        The page as `queries.episodes` returns it. With a text, `search` describes the search so far (see `TextHits`),
        and the rows have an `excerpt`: the role of the author, and the text in parts, each with whether it matches.
    """
    with index.reading() as db:
        version = index.version(db)
        index.texts.refresh(version)
        generation, total = index.generation(db), queries.counts(db)["episodes"]
    column = kind if kind in KINDS else None
    query = parse_query(matching.text or "")
    hits = index.texts.search(query, column, generation, total, version) if query.text else None
    if hits is not None:
        matching = replace(matching, ids=hits.ids, text=None if column else query.text)
    with index.reading() as db:
        page = queries.episodes(db, matching, order, offset, limit)
    rows = page["rows"]
    unknown = [row["id"] for row in rows if row["answer"] is None]
    answers = index.texts.answers(unknown, generation)
    ids = [row["id"] for row in rows]
    excerpts = index.texts.excerpts(query, column, hits.mode, ids, generation) if hits else {}
    for row in rows:
        row["answer"] = row["answer"] if row["answer"] is not None else answers.get(row["id"])
        row["excerpt"] = excerpts.get(row["id"])
    return page if hits is None else {**page, "search": {"mode": hits.mode, **hits.facts}}
