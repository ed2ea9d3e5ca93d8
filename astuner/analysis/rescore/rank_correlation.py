"""Rank correlation."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Return Kendall's tau-b for two equally long sequences; it accounts for ties.

    Computed in O(n log n) as in Knight, "A Computer Method for Calculating Kendall's Tau with Ungrouped Data" (1966):
    the discordant pairs are the inversions of `right` after sorting by `left`, and by `right` among equal values.

    Args:
        left, right: [N] finite numbers.

    Returns:
        A number from -1 to 1; None if all values of a sequence are equal, or N < 2.
    """
    x, y = np.asarray(left, dtype=np.float64), np.asarray(right, dtype=np.float64)
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    pairs = len(x) * (len(x) - 1) // 2
    ties_x, ties_y = _tied_pairs(x), _tied_pairs(y)
    ties_both = _tied_pairs(np.unique(np.column_stack((x, y)), axis=0, return_inverse=True)[1].ravel())
    if pairs in (ties_x, ties_y):
        return None
    concordant_minus_discordant = pairs - ties_x - ties_y + ties_both - 2 * _inversions(y)
    tau = concordant_minus_discordant / math.sqrt((pairs - ties_x) * (pairs - ties_y))
    return max(-1.0, min(1.0, tau))


def ranks(values: Sequence[float]) -> list[float]:
    """Return, for each value, the share of the other values below it, from 0 to 1; equal values count half."""
    array = np.asarray(values, dtype=np.float64)
    in_order = np.sort(array)
    below, not_above = np.searchsorted(in_order, array, "left"), np.searchsorted(in_order, array, "right")
    return [float(share) for share in (below + not_above - 1) / 2 / max(len(array) - 1, 1)]


def _tied_pairs(values: NDArray[np.generic]) -> int:
    counts = np.unique(values, return_counts=True)[1].astype(np.int64)
    return int((counts * (counts - 1) // 2).sum())


def _inversions(values: NDArray[np.float64]) -> int:
    """Return the number of pairs i < j with values[i] > values[j], by a bottom-up merge sort."""
    total, width, current = 0, 1, values.copy()
    while width < len(current):
        for start in range(0, len(current) - width, 2 * width):
            left, right = current[start : start + width], current[start + width : start + 2 * width]
            total += int((len(left) - np.searchsorted(left, right, "right")).sum())
            current[start : start + 2 * width] = np.sort(current[start : start + 2 * width], kind="stable")
        width *= 2
    return total
