"""What Trinity's trainer does beside the loss (`algorithm_type`): everything else of an algorithm is astuner's."""

from __future__ import annotations

from typing import Any

from trinity.algorithm.algorithm import AlgorithmType


class WithReference(AlgorithmType):
    """The trainer computes the starting model's logprobs of each experience, for the KL in the loss."""

    use_critic = False
    use_reference = True
    compute_advantage_in_trainer = False
    can_balance_batch = True
    schema = "experience"

    @classmethod
    def default_config(cls) -> dict[str, Any]:
        """Return nothing: all is given."""
        return {}


class WithoutReference(WithReference):
    """The trainer computes nothing of the starting model's; experiences bring zeros in its place."""

    use_reference = False
