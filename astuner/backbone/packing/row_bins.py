"""Divides training rows into micro-batches by the number of tokens that each row computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from astuner.context_tracker.packing import ID_BYTES, Packing, count_distinct_prefixes, in_prefix_order, pack_encoded

# Tokens of a padded micro-batch. A CPU gains nothing from more: it has no idle units to fill, and its caches overflow.
_MOST_PADDED_ON_CPU = 4096


@dataclass(frozen=True)
class RowBin:
    """The rows of a micro-batch.

    Attributes:
        tokens: number of tokens that a forward pass computes, including padding.
        packing: the packing of the rows if each distinct prefix is computed once, else None.
    """

    rows: tuple[int, ...]
    tokens: int
    packing: Packing | None = None


@dataclass(frozen=True)
class RowGroup:
    """Rows that a process computes in one micro-batch; it `shares` distinct prefixes or computes each row."""

    rows: list[int]
    shares: bool = False


@dataclass
class UpdateTokens:
    """Tokens in an update's forward passes: computed ones, with padding, and the minimum, distinct prefixes."""

    computed: int = 0
    distinct: int = 0

    def add_rows(self, encoded: Sequence[bytes]) -> None:
        """Add a mini-batch's distinct prefixes, given its rows' token ids as `encode_ids` returns them."""
        self.distinct += count_distinct_prefixes(encoded)

    def metrics(self) -> dict[str, float]:
        """Return the ratio of computed to distinct tokens as a metric."""
        return {"update/computed_per_distinct_token": self.computed / self.distinct}


def prefix_bins(
    encoded: Sequence[bytes], token_budget: int, should_pack: Callable[[Packing], bool]
) -> tuple[list[RowBin], list[list[int]]]:
    """Group rows with common prefixes; return bins with packings, and the groups that `should_pack` rejects.

    A group has at most `token_budget` distinct prefixes, or one row.
    """
    packed: list[RowBin] = []
    separate: list[list[int]] = []
    for rows in _prefix_groups(encoded, token_budget):
        packing = pack_encoded([encoded[row] for row in rows])
        if should_pack(packing):
            packed.append(RowBin(tuple(rows), len(packing.token_ids), packing))
        else:
            separate.append(rows)
    return packed, separate


def padded_bins(rows: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[RowBin]:
    """Group rows of similar length, which minimises padding, with at most `token_budget` tokens or one row."""
    bins: list[RowBin] = []
    current: list[int] = []

    def close() -> None:
        if current:
            bins.append(RowBin(tuple(current), len(current) * lengths[current[0]]))
            current.clear()

    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        if current and lengths[current[0]] * (len(current) + 1) > token_budget:
            close()
        current.append(row)
    close()
    return bins


def padded_budget(token_budget: int, device: torch.device) -> int:
    """Return the maximum number of tokens in a padded micro-batch, for a budget with `token_budget` tokens."""
    return min(token_budget, _MOST_PADDED_ON_CPU) if device.type == "cpu" else token_budget


def _prefix_groups(encoded: Sequence[bytes], token_budget: int) -> list[list[int]]:
    groups: list[list[int]] = []
    total = 0
    for row, new_tokens in in_prefix_order(encoded):
        if groups and total + new_tokens <= token_budget:
            groups[-1].append(row)
            total += new_tokens
        else:
            groups.append([row])
            total = len(encoded[row]) // ID_BYTES
    return groups


def packed_bins(rows: Sequence[int], lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group rows of at most `token_budget` tokens together, first-fit decreasing; a longer row is a separate group."""
    groups: list[list[int]] = []
    totals: list[int] = []
    for row in sorted(rows, key=lambda row: (-lengths[row], row)):
        group = next((g for g, total in enumerate(totals) if total + lengths[row] <= token_budget), len(groups))
        if group == len(groups):
            groups.append([])
            totals.append(0)
        groups[group].append(row)
        totals[group] += lengths[row]
    return groups


def divide_groups(groups: list[RowGroup], count: int) -> None:
    """Divide groups of rows, the largest first, until there are `count`. Every process has equally many rows."""
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda index: len(groups[index].rows))
        rows, shares = groups[largest].rows, groups[largest].shares
        middle = len(rows) // 2
        groups[largest : largest + 1] = [RowGroup(rows[:middle], shares), RowGroup(rows[middle:], shares)]


def largest_count(count: int, process_group: Any, device: str) -> int:
    """Return the largest `count` among all processes in a process group."""
    counts = torch.tensor([count], device=device)
    torch.distributed.all_reduce(counts, op=torch.distributed.ReduceOp.MAX, group=process_group)
    return int(counts.item())
