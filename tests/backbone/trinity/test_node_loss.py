"""The loss of a node in the midst of a rollout."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from campaigns.ray_nodes import Campaign, Scenario, is_faulty

pytestmark = [pytest.mark.trinity, pytest.mark.slow]


def test_a_run_that_loses_another_node_goes_on(tmp_path: Path):
    scenario = Scenario("two nodes", "kill", "rollout")
    facts = Campaign("trinity", sys.executable, tmp_path).report(scenario)
    assert not is_faulty(facts, ends=scenario.ends("trinity")), facts
