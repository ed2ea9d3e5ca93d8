"""Per-token estimates of the KL divergence from the policy to a reference policy.

After John Schulman, "Approximating KL divergence" (2020, http://joschu.net/blog/kl-approx.html), with
d = log π(token) - log π_ref(token), on tokens sampled from π:

    k1          d                   unbiased, high variance, of either sign
    k2          d² / 2              biased, low variance, never negative
    low_var_kl  exp(-d) - 1 + d     k3: unbiased, low variance, never negative (also DeepSeekMath,
                                    arXiv:2402.03300, eq. 4)

In the reward, the value of an estimate matters, and k1 is the usual choice (RLOO, REINFORCE++). In the loss, its
gradient matters, and an unbiased value can have a biased gradient. With tokens sampled from π:

    k1          ∇ log π             expectation 0: it adds only noise
    k2          d ∇ log π           expectation ∇ KL(π ‖ π_ref): the correct gradient
    low_var_kl  (1 - exp(-d)) ∇ log π   expectation ∇ KL(π_ref ‖ π), which to first order in d is the same
"""

from __future__ import annotations

from torch import Tensor

from astuner.config.algorithm_settings import KlType

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clipped to ± this before `exp` (e^20 ≈ 4.9e8), so that one token cannot overflow a sum. The gradient
of a token beyond the limit is zero."""

K3_LIMIT = 10.0
"""k3 is clipped to this value, as in verl, so that a token that the reference finds much more likely (14 times as
likely, or more) cannot dominate a batch. The gradient of a token beyond the limit is zero."""


def token_kl(logprobs: Tensor, ref_logprobs: Tensor, kind: KlType) -> Tensor:
    """Estimate KL(π ‖ π_ref) at each token (see the module's docstring).

    Args:
        logprobs: float, any shape: log-probabilities under π.
        ref_logprobs: float, the same shape: log-probabilities under the reference, without gradient.
        kind: `k1`, `k2` or `low_var_kl`.

    Returns:
        The same shape and dtype, in nats. The difference is first clipped to ± `LOG_RATIO_LIMIT`, and k3 to `K3_LIMIT`.
    """
    difference = (logprobs - ref_logprobs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if kind == "k1":
        return difference
    if kind == "k2":
        return difference.square() / 2
    # Near d = 0, where most tokens are, expm1 is more accurate than exp(-d) - 1.
    return ((-difference).expm1() + difference).clamp(max=K3_LIMIT)
