from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from astuner.algorithms.aggregate import sample_scales, token_weights
from astuner.errors import BackboneError

MODES = ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum-norm"]

# Episode 8 has samples of 3 and 1 trained tokens, episode 2 one of 2: 6 tokens, 2 episodes.
MASKS = torch.tensor([[0, 2, 1, 0], [0, 0, 1, 1], [0, 1, 0, 0]])
EPISODES = torch.tensor([8, 2, 8])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", [[0, 2 / 6, 1 / 6, 0], [0, 0, 1 / 6, 1 / 6], [0, 1 / 6, 0, 0]]),
        # 1 / (2 × 4) a token of episode 8, 1 / (2 × 2) of episode 2
        ("seq-mean-token-mean", [[0, 2 / 8, 1 / 8, 0], [0, 0, 1 / 4, 1 / 4], [0, 1 / 8, 0, 0]]),
        # 1 / (2 × 10) each
        ("seq-mean-token-sum-norm", [[0, 2 / 20, 1 / 20, 0], [0, 0, 1 / 20, 1 / 20], [0, 1 / 20, 0, 0]]),
    ],
)
def test_hand_worked(mode, expected):
    scales = sample_scales(MASKS.sum(dim=1), EPISODES, mode, max_response_length=10)
    torch.testing.assert_close(token_weights(MASKS, scales), torch.tensor(expected, dtype=torch.float32))


@given(
    masks=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3)), min_size=1, max_size=12).filter(
        lambda rows: any(tokens for tokens, _ in rows)
    )
)
@settings(deadline=None)
def test_sum_of_weights(masks):
    tokens, episodes = (torch.tensor(column) for column in zip(*masks, strict=True))
    sums = {mode: float((tokens * sample_scales(tokens, episodes, mode, 10)).sum()) for mode in MODES}
    n_episodes = len({episode for count, episode in masks if count})
    assert sums["token-mean"] == pytest.approx(1)
    assert sums["seq-mean-token-mean"] == pytest.approx(1)
    assert sums["seq-mean-token-sum-norm"] == pytest.approx(float(tokens.sum()) / (10 * n_episodes))


@pytest.mark.parametrize("mode", MODES)
def test_untrained_sample_is_ignored(mode):
    without = sample_scales(torch.tensor([3, 2]), torch.tensor([0, 1]), mode, 10)
    with_it = sample_scales(torch.tensor([3, 0, 2, 0]), torch.tensor([0, 0, 1, 5]), mode, 10)
    assert with_it[[0, 2]].equal(without)
    assert torch.isfinite(with_it).all()


@pytest.mark.parametrize("mode", MODES)
def test_nothing_to_train_is_an_error(mode):
    with pytest.raises(BackboneError, match="none of its 2 samples trains a token"):
        sample_scales(torch.tensor([0, 0]), torch.tensor([0, 1]), mode, 10)
