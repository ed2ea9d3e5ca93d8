from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from astuner.algorithms.policy_batch import NO_CLIP, CallTable, ClipRange, LossMetrics, PolicyBatch
from astuner.algorithms.policy_loss import (
    clipped_surrogate_loss,
    clipped_weight_loss,
    geometric_mean_loss,
    reinforce_loss,
    sequence_clipped_loss,
    soft_gate_loss,
    token_sequence_clipped_loss,
)
from astuner.errors import BackboneError

CLIP = ClipRange(low=0.2, high=0.28)
# Row 0 has A > 0 and row 1 A < 0: above, within and below the clip range; the last column is context.
RATIOS = [[1.5, 1.1, 0.5, 1.0], [1.5, 1.1, 0.5, 1.0]]
MASK = [[1, 1, 1, 0], [1, 1, 1, 0]]
ADVANTAGES = [2.0, -1.0]


def means_of(*parts: LossMetrics) -> dict[str, float]:
    """Return the means over the trained tokens of micro-batches, and the largest ratio."""
    total = {name: sum(float(getattr(part, name)) for part in parts) for name in LossMetrics.__slots__}
    names = {"clip_fraction_low": "clipped_low", "clip_fraction_high": "clipped_high"}
    names |= {"ratio_mean": "ratio_sum", "approx_kl": "kl_sum"}
    means = {name: total[field] / max(total["trained_tokens"], 1.0) for name, field in names.items()}
    return means | {"ratio_max": max(float(part.ratio_max) for part in parts)}


def table(*calls: tuple[int, int, int]) -> CallTable:
    return CallTable(*torch.tensor(calls, dtype=torch.int64).reshape(-1, 3).unbind(1))


def batch_of(ratios=RATIOS, mask=MASK, advantages=ADVANTAGES, calls=None) -> PolicyBatch:
    old = torch.linspace(-2, -1, len(ratios) * len(ratios[0]), dtype=torch.float64).view(len(ratios), -1)
    return PolicyBatch(
        logprobs=(old + torch.tensor(ratios, dtype=torch.float64).log()).requires_grad_(),
        old_logprobs=old,
        advantages=torch.tensor(advantages)[:, None].expand(old.shape),
        train_counts=torch.tensor(mask),
        calls=calls,
    )


def gradient_of(losses: torch.Tensor, batch: PolicyBatch) -> list[list[float]]:
    (gradient,) = torch.autograd.grad(losses.sum(), batch.logprobs)
    return [pytest.approx(row) for row in gradient.tolist()]


def test_surrogate_clips_the_update():
    batch = batch_of()
    loss = clipped_surrogate_loss(batch, CLIP)
    # d(-r A)/d log π = -r A where not clipped.
    assert gradient_of(loss.token_losses, batch) == [[0, -2.2, -1.0, 0], [1.5, 1.1, 0, 0]]
    assert loss.token_losses.tolist() == [
        pytest.approx([-2.56, -2.2, -1.0, 0.0]),
        pytest.approx([1.5, 1.1, 0.8, 0.0]),
    ]


def test_surrogate_is_policy_gradient_on_policy():
    batch = batch_of(ratios=[[1.0] * 4] * 2)
    loss = clipped_surrogate_loss(batch, CLIP)
    assert gradient_of(loss.token_losses, batch) == [[-2, -2, -2, 0], [1, 1, 1, 0]]


def test_a_dual_clip_limits_the_loss_of_negative_advantages():
    batch = batch_of(ratios=[[4.0, 3.0, 1.1, 1.0], [4.0, 2.9, 0.5, 1.0]])
    loss = clipped_surrogate_loss(batch, ClipRange(0.2, 0.28, dual=3.0))
    # Row 1, A = -1: a ratio of 4 counts as 3 and has no gradient; 2.9 and 0.5 (clipped to 0.8) are as without it.
    assert loss.token_losses.tolist() == [pytest.approx([-2.56, -2.56, -2.2, 0.0]), pytest.approx([3, 2.9, 0.8, 0.0])]
    assert gradient_of(loss.token_losses, batch) == [[0, 0, -2.2, 0], [0, 2.9, 0, 0]]


def test_geometric_mean_clips_tokens_and_shares_the_product():
    # Row 0: calls of (1.5, 1.1) and (0.5), A = 2; row 1: one call of all, A = -1.
    batch = batch_of(calls=table((0, 0, 2), (0, 2, 3), (1, 0, 3)))
    loss = geometric_mean_loss(batch, ClipRange(0.4, 0.2))
    # A > 0: log 1.5 = 0.405 is cut to 0.2. A < 0: log 0.5 = -0.693 is raised to -0.4, and 1.5 stays.
    first, second, whole = math.sqrt(math.exp(0.2) * 1.1), 0.5, (1.5 * 1.1 * math.exp(-0.4)) ** (1 / 3)
    assert loss.token_losses.tolist() == [
        pytest.approx([-2 * first, -2 * first, -2 * second, 0.0]),
        pytest.approx([whole, whole, whole, 0.0]),
    ]
    # The call's n tokens carry the mean, which each log π that is not clipped moves by 1 / n.
    assert gradient_of(loss.token_losses, batch) == [[0, -2 * first, -2 * second, 0], [whole, whole, 0, 0]]
    summary = means_of(loss.metrics)
    assert (summary["clip_fraction_low"], summary["clip_fraction_high"]) == pytest.approx((1 / 6, 1 / 6))


def test_the_soft_gate_decreases_smoothly():
    batch = batch_of(ratios=[[1.0, 1.5, 0.5, 1.0], [1.0, 1.5, 0.5, 1.0]])
    loss = soft_gate_loss(batch, NO_CLIP)

    # f(r) = 4 / τ σ(τ (r - 1)), so that r f'(r) = 4 r σ (1 - σ), which is 1 at r = 1.
    def gate(ratio: float, temperature: float) -> tuple[float, float]:
        sigmoid = 1 / (1 + math.exp(-temperature * (ratio - 1)))
        return 4 / temperature * sigmoid, 4 * ratio * sigmoid * (1 - sigmoid)

    positive, negative = ([gate(ratio, t) for ratio in (1.0, 1.5, 0.5)] for t in (1.0, 1.05))
    assert loss.token_losses.tolist() == [
        pytest.approx([*(-2 * value for value, _ in positive), 0.0]),
        pytest.approx([*(value for value, _ in negative), 0.0]),
    ]
    expected = [[*(-2 * slope for _, slope in positive), 0], [*(slope for _, slope in negative), 0]]
    assert gradient_of(loss.token_losses, batch) == expected
    assert (positive[0][1], negative[0][1]) == (1, 1)
    assert negative[1][1] < positive[1][1] < 1.5


def test_clipped_weights_keep_every_gradient():
    batch = batch_of()
    loss = clipped_weight_loss(batch, CLIP)
    # -clip(r) A, whatever the sign: no token is dropped.
    assert gradient_of(loss.token_losses, batch) == [[-2.56, -2.2, -1.6, 0], [1.28, 1.1, 0.8, 0]]
    expected = -torch.tensor([1.28, 1.1, 0.8], dtype=torch.float64) * 2 * batch.logprobs[0, :3]
    torch.testing.assert_close(loss.token_losses[0, :3], expected)


def test_low_of_one_means_no_lower_bound():
    batch = batch_of(ratios=[[1e-3, 0.5, 1.0, 1.0], [8.0, 1.0, 1.0, 1.0]])
    loss = clipped_weight_loss(batch, ClipRange(low=1.0, high=4.0))
    assert gradient_of(loss.token_losses, batch) == [[-2e-3, -1.0, -2.0, 0], [5.0, 1.0, 1.0, 0]]


def test_reinforce_ignores_the_ratio():
    batch = batch_of()
    loss = reinforce_loss(batch, NO_CLIP)
    assert gradient_of(loss.token_losses, batch) == [[-2, -2, -2, 0], [1, 1, 1, 0]]
    torch.testing.assert_close(loss.token_losses[1, :3], batch.logprobs[1, :3])


def test_calls_are_clipped_as_a_whole_and_share_one_gradient():
    # Row 0: calls of ratios (1.5, 1.1) and (0.5); row 1: one call of (1.5, 1.1, 0.5).
    batch = batch_of(calls=table((1, 0, 3), (0, 2, 3), (0, 0, 2)))
    loss = sequence_clipped_loss(batch, CLIP)
    first = math.sqrt(1.65)  # 1.2845, above 1.28: clipped, since A > 0
    call_ratio = 0.825 ** (1 / 3)  # 0.9379, within
    assert first > 1.28
    assert loss.token_losses.tolist() == [
        pytest.approx([-2.56, -2.56, -1.0, 0.0]),
        pytest.approx([call_ratio, call_ratio, call_ratio, 0.0]),
    ]
    # Three tokens carry s, and each log π moves s by s / 3.
    assert gradient_of(loss.token_losses, batch) == [[0, 0, -1.0, 0], [call_ratio, call_ratio, call_ratio, 0]]


def test_the_gradient_of_a_token_is_that_of_its_call_if_the_advantages_are():
    calls = table((0, 0, 2), (0, 0, 3), (1, 0, 3))
    batch = batch_of(mask=[[2, 2, 1, 0], [1, 1, 1, 0]], calls=calls)
    by_call, by_token = (f(batch, CLIP) for f in (sequence_clipped_loss, token_sequence_clipped_loss))
    torch.testing.assert_close(by_token.token_losses, by_call.token_losses)
    # Weighted by its number of calls divided by their lengths, each token has the gradient of the call.
    weights = [
        torch.autograd.grad((loss.token_losses[1] * batch.train_counts[1]).sum(), batch.logprobs, retain_graph=True)[0]
        for loss in (by_call, by_token)
    ]
    torch.testing.assert_close(*weights)
    assert means_of(by_token.metrics) == pytest.approx(means_of(by_call.metrics))


def test_each_token_of_a_call_has_its_advantage():
    # One call of ratios 1.5, 1.1, 0.5: s = 0.9379 for all tokens, within the clip range.
    batch = batch_of(ratios=[[1.5, 1.1, 0.5]], mask=[[1, 1, 1]], advantages=[1.0], calls=table((0, 0, 3)))
    batch = replace(batch, advantages=torch.tensor([[2.0, 0.0, -1.0]]))
    loss = token_sequence_clipped_loss(batch, CLIP)
    call_ratio = 0.825 ** (1 / 3)
    assert loss.token_losses.tolist() == [pytest.approx([-2 * call_ratio, 0.0, call_ratio])]
    assert gradient_of(loss.token_losses, batch) == [[-2 * call_ratio, 0.0, call_ratio]]


def test_overlapping_calls_each_keep_their_ratio():
    # A call of the first two tokens and one of all three: tokens 0 and 1 were sampled twice.
    batch = batch_of(ratios=[[1.2, 0.9, 1.1]], mask=[[2, 2, 1]], advantages=[1.0], calls=table((0, 0, 2), (0, 0, 3)))
    short, long = math.sqrt(1.08), 1.188 ** (1 / 3)
    losses = sequence_clipped_loss(batch, CLIP).token_losses
    assert losses.tolist() == [pytest.approx([-(short + long) / 2, -(short + long) / 2, -long])]
    assert (losses * batch.train_counts).sum().item() == pytest.approx(-2 * short - 3 * long)


@pytest.mark.parametrize(
    "calls",
    [table((0, 0, 3)), table((0, 0, 3), (1, 0, 4)), table((0, 0, 3), (1, 0, 3), (1, 1, 2))],
    ids=["missing", "too long", "one too many"],
)
def test_calls_that_do_not_match_the_train_counts_are_an_error(calls):
    with pytest.raises(BackboneError, match="do not match train_counts at"):
        sequence_clipped_loss(batch_of(calls=calls), CLIP)


def test_missing_calls_are_an_error():
    with pytest.raises(BackboneError, match=r"set PolicyBatch\.calls"):
        sequence_clipped_loss(batch_of(), CLIP)


@pytest.mark.parametrize(
    ("function", "clip"),
    [
        (clipped_surrogate_loss, CLIP),
        (clipped_surrogate_loss, NO_CLIP),
        (sequence_clipped_loss, CLIP),
        (sequence_clipped_loss, NO_CLIP),
        (geometric_mean_loss, CLIP),
        (soft_gate_loss, NO_CLIP),
        (reinforce_loss, NO_CLIP),
    ],
)
def test_gradcheck(function, clip):
    batch = batch_of(mask=[[1, 2, 1, 0], [1, 1, 1, 0]], calls=table((0, 0, 2), (0, 1, 3), (1, 0, 3)))

    def losses(logprobs):
        perturbed = PolicyBatch(logprobs, batch.old_logprobs, batch.advantages, batch.train_counts, batch.calls)
        return function(perturbed, clip).token_losses

    assert torch.autograd.gradcheck(losses, batch.logprobs)


@pytest.mark.parametrize(
    ("function", "clip"),
    [
        (clipped_surrogate_loss, CLIP),
        (sequence_clipped_loss, CLIP),
        (clipped_weight_loss, CLIP),
        (token_sequence_clipped_loss, CLIP),
        (geometric_mean_loss, CLIP),
        (soft_gate_loss, NO_CLIP),
        (reinforce_loss, NO_CLIP),
    ],
)
def test_untrained_tokens_are_ignored(function, clip):
    calls = table((0, 0, 3), (1, 0, 3))
    clean = batch_of(calls=calls)
    with torch.no_grad():
        dirty = PolicyBatch(
            clean.logprobs.clone(), clean.old_logprobs.clone(), clean.advantages, clean.train_counts, calls
        )
        dirty.old_logprobs[:, 3] = float("nan")
        dirty.logprobs[0, 3] = -1e30
    dirty.logprobs.requires_grad_()
    expected, loss = function(clean, clip), function(dirty, clip)
    torch.testing.assert_close(loss.token_losses, expected.token_losses, rtol=0, atol=0)
    assert means_of(loss.metrics) == means_of(expected.metrics)
    gradients = [
        torch.autograd.grad(result.token_losses.sum(), batch.logprobs)[0]
        for result, batch in ((loss, dirty), (expected, clean))
    ]
    assert gradients[0].equal(gradients[1])


def test_a_runaway_token_stays_finite():
    batch = batch_of(ratios=[[math.exp(90), 1.0]], mask=[[1, 1]], advantages=[-1.0])
    loss = clipped_surrogate_loss(batch, CLIP)
    assert loss.token_losses[0, 0].item() == pytest.approx(math.exp(20))
    assert gradient_of(loss.token_losses, batch) == [[0.0, 1.0]]


def test_metrics_hand_worked():
    # Row 0 (A > 0) has 1.5 above, row 1 (A < 0) has 0.5 below; its first token counts twice: 7 tokens.
    batch = batch_of(mask=[[1, 1, 1, 0], [2, 1, 1, 0]], calls=table((0, 0, 3), (1, 0, 1), (1, 0, 3)))
    kl = {r: r - 1 - math.log(r) for r in (1.5, 1.1, 0.5)}
    expected = {
        "clip_fraction_low": 1 / 7,
        "clip_fraction_high": 1 / 7,
        "ratio_mean": (3 * 1.5 + 2 * 1.1 + 2 * 0.5) / 7,
        "ratio_max": 1.5,
        "approx_kl": (3 * kl[1.5] + 2 * kl[1.1] + 2 * kl[0.5]) / 7,
    }
    assert means_of(clipped_surrogate_loss(batch, CLIP).metrics) == pytest.approx(expected)
    # CISPO clips weights whatever the advantage: three above, two below.
    expected |= {"clip_fraction_low": 2 / 7, "clip_fraction_high": 3 / 7}
    assert means_of(clipped_weight_loss(batch, CLIP).metrics) == pytest.approx(expected)
    expected |= {"clip_fraction_low": 0, "clip_fraction_high": 0}
    assert means_of(reinforce_loss(batch, NO_CLIP).metrics) == pytest.approx(expected)
    # GSPO: calls of 0.9379 (A > 0), 1.5 and 0.9379 (A < 0); with a bound of 0.95 the last is clipped: 3 tokens of 7.
    call_ratio = 0.825 ** (1 / 3)
    expected |= {"clip_fraction_low": 3 / 7, "ratio_mean": (6 * call_ratio + 1.5) / 7}
    summary = means_of(sequence_clipped_loss(batch, ClipRange(low=0.05, high=0.05)).metrics)
    assert summary == pytest.approx(expected)


def test_metrics_of_micro_batches_add_up():
    all_rows = batch_of()
    parts = [
        clipped_surrogate_loss(
            PolicyBatch(
                all_rows.logprobs[s], all_rows.old_logprobs[s], all_rows.advantages[s], all_rows.train_counts[s]
            ),
            CLIP,
        ).metrics
        for s in (slice(0, 1), slice(1, 2))
    ]
    summary = means_of(*parts)
    assert summary == pytest.approx(means_of(clipped_surrogate_loss(all_rows, CLIP).metrics))
