"""Corrections of the difference between sampler and trainer, against references written from the papers."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any, get_args

import pytest
import torch

from astuner.algorithms.correction import (
    CORRECTION_SUMS,
    Correction,
    corrected_loss,
    correction_summary,
    resolve_correction,
)
from astuner.algorithms.policy_batch import CallTable, PolicyBatch
from astuner.algorithms.registry import resolve
from astuner.config.algorithm_settings import AlgorithmConfig
from astuner.config.corrections import CORRECTIONS, CorrectionConfig, CorrectionName
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError

# Row 0 is one call with r = π_old / μ of 2.5, 0.6 and 1.2 (product 1.8, geometric mean 1.2164), and A = 1. Row 1 is one
# call with r of 0.4 and 1 (product 0.4, geometric mean 0.6325), and A = -1. The other tokens are context.
RATIOS = [[1.0, 2.5, 0.6, 1.2], [0.4, 1.0, 1.0, 1.0]]
COUNTS = [[0, 1, 1, 1], [1, 1, 0, 0]]
CALLS = [(0, 1, 4), (1, 0, 2)]


def table(calls: list[tuple[int, int, int]]) -> CallTable:
    return CallTable(*torch.tensor(calls, dtype=torch.int64).reshape(-1, 3).unbind(1))


def batch_of(
    ratios: Any = RATIOS, counts: Any = COUNTS, calls: Any = CALLS, advantages: Any = (1.0, -1.0), current: Any = None
) -> PolicyBatch:
    """Return a batch with ratios π_old / μ, and ratios π / π_old of `current` (1 by default)."""
    log_ratio = torch.tensor(ratios, dtype=torch.float64).log()
    sampler = torch.linspace(-3, -1, log_ratio.numel(), dtype=torch.float64).view(log_ratio.shape)
    step = torch.zeros_like(sampler) if current is None else torch.tensor(current, dtype=torch.float64).log()
    return PolicyBatch(
        logprobs=(sampler + log_ratio + step).requires_grad_(),
        old_logprobs=sampler + log_ratio,
        advantages=torch.tensor(advantages)[:, None].expand(sampler.shape),
        train_counts=torch.tensor(counts),
        calls=table(calls),
        sampler_logprobs=sampler,
    )


def correction(mode: str, *, old_from_trainer: bool = True, **bounds: float) -> Correction:
    return Correction(CorrectionConfig(mode=mode, **bounds), old_from_trainer)


@pytest.mark.parametrize(
    ("mode", "bounds", "expected"),
    [
        ("none", {}, [[1, 1, 1], [1, 1]]),
        ("token_tis", {}, [[2, 0.6, 1.2], [0.4, 1]]),
        ("token_tis", {"max_weight": 1.1}, [[1.1, 0.6, 1.1], [0.4, 1]]),
        ("decoupled", {}, [[2.5, 0.6, 1.2], [0.4, 1]]),
        ("seq_tis", {}, [[1.8, 1.8, 1.8], [0.4, 0.4]]),
        ("seq_tis", {"max_weight": 1.5}, [[1.5, 1.5, 1.5], [0.4, 0.4]]),
        ("token_mis", {}, [[0, 0.6, 1.2], [0.4, 1]]),
        ("token_mis", {"min_weight": 0.5}, [[0, 0.6, 1.2], [0, 1]]),
        ("seq_mis", {}, [[1.8, 1.8, 1.8], [0, 0]]),
        ("icepop", {}, [[2.5, 0.6, 1.2], [0, 1]]),
        ("geo_rs", {}, [[0, 0, 0], [0, 0]]),
        # Bounds of μ / π_old, whose geometric means are 0.8221 and 1.5811.
        ("geo_rs", {"min_rejection": 0.8, "max_rejection": 1.25}, [[1, 1, 1], [0, 0]]),
        ("geo_rs_token_tis", {"min_rejection": 0.8, "max_rejection": 1.6}, [[2, 0.6, 1.2], [0.4, 1]]),
        # Means of r - 1 - log r: (0.5837 + 0.1108 + 0.0177) / 3 = 0.2374, and (0.3163 + 0) / 2 = 0.1581.
        ("k3_rs", {"max_rejection": 0.2}, [[0, 0, 0], [1, 1]]),
        ("k3_rs_seq_tis", {"max_rejection": 0.4, "max_weight": 1.5}, [[1.5, 1.5, 1.5], [0.4, 0.4]]),
        # Means of log(μ / π): -0.1959 with A > 0, and 0.4581 with A < 0.
        ("off_policy_mask", {}, [[1, 1, 1], [1, 1]]),
        ("off_policy_mask", {"max_rejection": 0.45}, [[1, 1, 1], [0, 0]]),
    ],
)
def test_hand_worked_factors(mode: str, bounds: dict[str, float], expected: list[list[float]]) -> None:
    factors, _ = correction(mode, **bounds).factors(batch_of())
    assert factors[0, 1:].tolist() == pytest.approx(expected[0])
    assert factors[1, :2].tolist() == pytest.approx(expected[1])


def test_only_calls_with_negative_advantages_are_masked_as_off_policy() -> None:
    """In a batch whose calls have drifted alike: log(μ / π) is 0.7 at every token."""
    drifted = batch_of(ratios=[[0.5, 0.5], [0.5, 0.5]], counts=[[1, 1], [1, 1]], calls=[(0, 0, 2), (1, 0, 2)])
    factors, _ = correction("off_policy_mask").factors(drifted)
    assert factors.tolist() == [[1, 1], [0, 0]]
    # The drift includes that of the update: here it takes the policy back to the sampler's.
    restored = batch_of(
        [[0.5, 0.5], [0.5, 0.5]], [[1, 1], [1, 1]], [(0, 0, 2), (1, 0, 2)], current=[[2.0, 2.0], [2.0, 2.0]]
    )
    assert correction("off_policy_mask").factors(restored)[0].tolist() == [[1, 1], [1, 1]]


def test_off_policy_masking_reads_the_advantage_of_each_token() -> None:
    """The masked tokens of a call are those with negative advantages, which differ within it with a teacher."""
    drifted = batch_of(ratios=[[0.5, 0.5, 0.5]], counts=[[1, 1, 1]], calls=[(0, 0, 3)], advantages=[1.0])
    drifted = replace(drifted, advantages=torch.tensor([[1.0, -1.0, 0.0]]))
    factors, metrics = correction("off_policy_mask").factors(drifted)
    assert factors.tolist() == [[1, 0, 1]]
    assert metrics.masked == 1


def reference_factor(mode: str, ratios: list[float], place: int, advantage: float, drift: float) -> float:
    """Return the factor of a token of a call, in plain floats."""
    name = mode.removeprefix("geo_rs_").removeprefix("k3_rs_")
    product = math.prod(ratios)
    r = ratios[place]
    factor = {
        "token_tis": min(r, 2.0),
        "decoupled": r,
        "seq_tis": min(product, 2.0),
        "token_mis": r if r <= 2.0 else 0.0,
        "seq_mis": product if 0.5 <= product <= 2.0 else 0.0,
        "icepop": r if 0.5 <= r <= 5.0 else 0.0,
    }.get(name, 1.0)
    if mode.startswith("geo_rs"):
        factor *= 0.999 <= math.prod(1 / x for x in ratios) ** (1 / len(ratios)) <= 1.001
    if mode.startswith("k3_rs"):
        factor *= sum(x - 1 - math.log(x) for x in ratios) / len(ratios) <= 0.01
    if mode == "off_policy_mask":
        factor *= not (advantage < 0 and drift > 0.5)
    return factor


@pytest.mark.parametrize("old_from_trainer", [True, False])
@pytest.mark.parametrize("mode", CORRECTIONS)
def test_factors_and_gradients_equal_a_reference(mode: str, old_from_trainer: bool) -> None:
    """Calls of several lengths and gaps; a token of two calls has the sum of their gradients."""
    numbers = random.Random(f"{mode}{old_from_trainer}")
    rows, width = 12, 9
    scale = [numbers.choice([5e-4, 0.05, 0.5, 1.2]) for _ in range(rows)]
    ratios = [[math.exp(numbers.gauss(0, size)) for _ in range(width)] for size in scale]
    current = [[math.exp(numbers.gauss(0, 0.1)) for _ in range(width)] for _ in range(rows)]
    calls = [(row, start, numbers.randint(start + 1, width)) for row in range(rows) for start in (1, 4)]
    calls += [(row, 2, 3) for row in range(0, rows, 3)]
    counts = [[sum(r == row and a <= t < b for r, a, b in calls) for t in range(width)] for row in range(rows)]
    advantages = [numbers.choice([-1.0, 0.75]) for _ in range(rows)]
    batch = batch_of(ratios, counts, calls, advantages, current)
    algorithm = resolve(AlgorithmConfig(adv_estimator="grpo"))
    assert algorithm.rule is not None
    loss, _ = corrected_loss(algorithm.rule, correction(mode, old_from_trainer=old_from_trainer), batch)
    total = (loss.token_losses * batch.train_counts).sum()
    (gradient,) = torch.autograd.grad(total, batch.logprobs)

    expected_total, expected = 0.0, [[0.0] * width for _ in range(rows)]
    for row, start, end in calls:
        span = range(start, end)
        moved = [ratios[row][t] * (1.0 if old_from_trainer else current[row][t]) for t in span]
        drift = -sum(math.log(ratios[row][t] * current[row][t]) for t in span) / len(span)
        for t in span:
            factor = reference_factor(mode, moved, t - start, advantages[row], drift)
            ratio, advantage = current[row][t], advantages[row]
            clipped = min(max(ratio, 0.8), 1.2)
            expected_total -= factor * min(ratio * advantage, clipped * advantage)
            if ratio * advantage <= clipped * advantage:
                expected[row][t] -= factor * ratio * advantage
    assert total.item() == pytest.approx(expected_total, abs=1e-9)
    torch.testing.assert_close(gradient, torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=1e-9)
    if mode != "none":
        factors, _ = correction(mode, old_from_trainer=old_from_trainer).factors(batch)
        assert not torch.allclose(factors, torch.ones_like(factors))


@pytest.mark.parametrize("mode", CORRECTIONS)
def test_rows_may_be_merged_or_apart(mode: str) -> None:
    """Two calls that share a prompt of sampled tokens, in one row and in two rows."""
    shared, first = [0.7, 1.3], [1.1, 0.2]
    one = batch_of([shared + first], [[2, 2, 1, 1]], [(0, 0, 4), (0, 0, 2)], [-1.0])
    two = batch_of(
        [shared + first, [*shared, 1.0, 1.0]], [[1, 1, 1, 1], [1, 1, 0, 0]], [(0, 0, 4), (1, 0, 2)], [-1.0] * 2
    )
    sums = [(correction(mode).factors(batch)[0] * batch.train_counts).sum().item() for batch in (one, two)]
    assert sums[0] == pytest.approx(sums[1])


def test_context_and_padding_are_ignored() -> None:
    clean = batch_of()
    dirty = replace(clean, sampler_logprobs=torch.where(clean.train_counts > 0, clean.sampler_logprobs, math.nan))
    for mode in CORRECTIONS:
        expected, metrics = correction(mode).factors(clean)
        factors, dirty_metrics = correction(mode).factors(dirty)
        torch.testing.assert_close(factors * clean.train_counts, expected * clean.train_counts, rtol=0, atol=0)
        assert all(getattr(metrics, name) == getattr(dirty_metrics, name) for name in CORRECTION_SUMS)


def test_runaway_tokens_stay_finite() -> None:
    batch = batch_of([[math.exp(90), math.exp(-90)]], [[1, 1]], [(0, 0, 2)], [1.0])
    for mode in CORRECTIONS:
        assert correction(mode).factors(batch)[0].isfinite().all(), mode


def test_a_call_table_is_required_where_calls_are_the_unit() -> None:
    without = replace(batch_of(), calls=None)
    assert correction("token_tis").factors(without)[0].shape == without.logprobs.shape
    with pytest.raises(BackboneError, match=r"set PolicyBatch\.calls"):
        correction("seq_tis").factors(without)


def summary_of(mode: str, batch: PolicyBatch) -> dict[str, float]:
    metrics = correction(mode).factors(batch)[1]
    return correction_summary({name: float(getattr(metrics, name)) for name in CORRECTION_SUMS})


def test_metrics_hand_worked() -> None:
    gaps = [abs(math.log(r)) for r in (2.5, 0.6, 1.2, 0.4, 1)]
    squares = 6.25 + 0.36 + 1.44 + 0.16 + 1
    expected = {
        "correction/gap_mean": sum(gaps) / 5,
        "correction/gap_max": math.log(2.5),
        "correction/effective_sample_size": 5.7**2 / (5 * squares),
        "correction/truncated": 1 / 5,
        "correction/masked": 0.0,
    }
    assert summary_of("token_tis", batch_of()) == pytest.approx(expected)
    # IcePop masks 0.4, and truncates nothing.
    expected |= {"correction/truncated": 0.0, "correction/masked": 1 / 5}
    assert summary_of("icepop", batch_of()) == pytest.approx(expected)
    # By call: 1.8 for three tokens, 0.4 for two, which are masked.
    calls = {"correction/effective_sample_size": 6.2**2 / (5 * (3 * 3.24 + 2 * 0.16)), "correction/masked": 2 / 5}
    assert summary_of("seq_mis", batch_of()) == pytest.approx(expected | calls)


def test_metrics_of_micro_batches_add_up() -> None:
    whole = batch_of()
    parts = [
        batch_of(RATIOS[:1], COUNTS[:1], CALLS[:1], [1.0]),
        batch_of(RATIOS[1:], COUNTS[1:], [(0, 0, 2)], [-1.0]),
    ]
    for mode in ("token_tis", "seq_mis", "k3_rs"):
        first, second = (correction(mode).factors(part)[1] for part in parts)
        expected = correction(mode).factors(whole)[1]
        for name in CORRECTION_SUMS:
            pair = getattr(first, name), getattr(second, name)
            added = torch.maximum(*pair) if name.endswith("_max") else torch.add(*pair)
            assert added.item() == pytest.approx(getattr(expected, name).item()), name


@pytest.mark.parametrize("mode", ["none", "token_tis", "seq_mis", "k3_rs", "off_policy_mask"])
def test_metrics_by_staleness_are_those_of_its_calls(mode: str) -> None:
    """Call 0 is fresh, call 1 is two steps stale; nothing is one step stale."""
    parts = [
        batch_of(RATIOS[:1], COUNTS[:1], CALLS[:1], [1.0]),
        None,
        batch_of(RATIOS[1:], COUNTS[1:], [(0, 0, 2)], [-1.0]),
    ]
    expected = [correction(mode).factors(part)[1] if part else None for part in parts]
    by_age = correction(mode).metrics_by_staleness(batch_of(), torch.tensor([0, 2]), 3)
    for found, part in zip(by_age, expected, strict=True):
        for name in CORRECTION_SUMS:
            value = getattr(part, name).item() if part else 0.0
            assert getattr(found, name).item() == pytest.approx(value), name
    # The last age includes all above.
    (fresh, stale) = correction(mode).metrics_by_staleness(batch_of(), torch.tensor([0, 7]), 2)
    assert (fresh.tokens.item(), stale.tokens.item()) == (3, 2)
    assert correction(mode).metrics_by_staleness(batch_of(), torch.tensor([0, 2]), 0) == []


def run(backbone: str = "local", top_p: float = 1.0, **common: Any) -> AstunerConfig:
    values = {"backbone": backbone, "rollout": {"temperature": 1.0, "top_p": top_p}, "trainer_common": common}
    return AstunerConfig.model_validate(values)


@pytest.mark.parametrize(
    ("config", "facts", "mode", "old_from_trainer"),
    [
        (run(), (False, False), "none", False),
        (run(), (True, False), "token_tis", True),
        (run("verl", mini_batch_num=4), (True, True), "token_tis", True),
        (run("verl"), (False, True), "token_tis", True),
        (run("trinity"), (False, True), "token_tis", True),
        # Trinity trains a mini-batch before it computes the logprobs of the next.
        (run("trinity", mini_batch_num=2), (True, True), "none", False),
        (run("trinity", mini_batch_num=2, correction={"mode": "geo_rs"}), (True, True), "geo_rs", False),
        (run(correction={"mode": "none"}), (True, False), "none", True),
        (run("trinity", correction={"mode": "none"}), (True, True), "none", False),
        (run(correction={"mode": "none"}), (False, False), "none", False),
        (run(correction={"mode": "seq_mis"}), (False, False), "seq_mis", True),
        (run(correction={"mode": "k3_rs", "old_logprobs": "sampler"}), (True, True), "k3_rs", False),
        (run(correction={"old_logprobs": "sampler"}), (True, True), "none", False),
        (run(correction={"old_logprobs": "trainer"}), (False, False), "none", True),
        # REINFORCE has no ratio that could correct.
        (run("trinity", mini_batch_num=2, algorithm={"adv_estimator": "rloo"}), (True, True), "token_tis", False),
        (
            run(correction={"old_logprobs": "sampler"}, algorithm={"adv_estimator": "opo"}),
            (True, True),
            "token_tis",
            False,
        ),
        (run(top_p=0.9), (False, False), "token_tis", True),
        (run("verl", top_p=0.9), (False, False), "token_tis", True),
        # Engines of trinity do not return the logprobs that the correction would need.
        (run("trinity", top_p=0.9), (False, False), "none", False),
    ],
)
def test_the_correction_of_a_run(
    config: AstunerConfig, facts: tuple[bool, bool], mode: str, old_from_trainer: bool
) -> None:
    low_precision, can_differ = facts
    result = resolve_correction(config, low_precision=low_precision, can_differ=can_differ)
    assert (result.config.mode, result.old_from_trainer) == (mode, old_from_trainer)


def test_every_declared_correction_is_configurable_and_cited() -> None:
    assert get_args(CorrectionName) == ("auto", *CORRECTIONS)
    assert all(spec.source for name, spec in CORRECTIONS.items() if name != "none")
