"""The environment service that a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from astuner.config.root import AstunerConfig
from astuner.launcher.built_in_services import automatic_env_service


def options(reader: dict[str, Any], tmp_path: Path) -> dict[str, str]:
    """Return the options of the command that starts the service."""
    config = AstunerConfig.model_validate({"task_reader": reader, "rollout": {"max_env_worker": 100}})
    started = automatic_env_service(config, tmp_path)
    assert started is not None
    return dict(word.split("=", 1) for word in started[0].argv if word.startswith("--"))


def test_the_limits_of_the_configuration_reach_the_service(tmp_path: Path) -> None:
    source = {"env_type": "gymnasium/Taxi", "env_url": "auto"}
    defaults = options({"type": "env_service", "env_service": source}, tmp_path)
    assert (defaults["--max-instances"], defaults["--step-timeout"], defaults["--idle-seconds"]) == (
        "200",
        "60.0",
        "600.0",
    )
    limits = {"max_instances": 7, "step_timeout": 5, "idle_seconds": 9, "max_observation_bytes": 1000}
    given = options({"type": "env_service", "env_service": {**source, "limits": limits}}, tmp_path)
    assert (given["--max-instances"], given["--max-observation-bytes"]) == ("7", "1000")
    assert (given["--step-timeout"], given["--idle-seconds"]) == ("5.0", "9.0")


def test_parts_of_a_mixture_share_the_service_with_the_larger_limits(tmp_path: Path) -> None:
    parts = [
        {"type": "env_service", "weight": 1, "env_service": {"env_url": "auto", "limits": {"step_timeout": seconds}}}
        for seconds in (5, 700)
    ]
    assert options({"type": "mixture", "mixture": parts}, tmp_path)["--step-timeout"] == "700.0"
