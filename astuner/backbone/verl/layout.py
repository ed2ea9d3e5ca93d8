"""Which row goes to which worker in which mini-batch, so that any number of rows makes equal shares."""

from __future__ import annotations

from collections.abc import Sequence


def arrange(
    mini_batches: Sequence[Sequence[int]], lengths: Sequence[int], workers: int
) -> list[list[list[int | None]]]:
    """Share out the rows of each mini-batch.

    verl gives each worker an equal part of a batch, and has it cut that into mini-batches of equal size; rows that
    train nothing fill up.

    Args:
        mini_batches: the numbers of the rows of each.
        lengths: tokens of each row, by number.
        workers: data-parallel ones.

    Returns:
        For each worker, for each mini-batch, row numbers, None for a row that fills up; all lists of rows are of one
        length, and a worker's tokens differ little from another's.
    """
    size = max(-(-len(rows) // workers) for rows in mini_batches)
    shares: list[list[list[int | None]]] = [[] for _ in range(workers)]
    for rows in mini_batches:
        parts: list[list[int | None]] = [[] for _ in range(workers)]
        totals = [0] * workers
        for row in sorted(rows, key=lambda row: (-lengths[row], row)):
            # The longest row that is left goes to the worker with the fewest tokens that has room.
            worker = min((w for w in range(workers) if len(parts[w]) < size), key=lambda w: (totals[w], w))
            parts[worker].append(row)
            totals[worker] += lengths[row]
        for share, part in zip(shares, parts, strict=True):
            share.append(part + [None] * (size - len(part)))
    return shares
