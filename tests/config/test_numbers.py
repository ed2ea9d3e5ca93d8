"""Every numeric key: each value is accepted, or rejected by the key's name with what is expected."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from astuner.config.keys import KeyPath, dotted, parts, schema, with_value
from astuner.config.loading import load_config
from astuner.config.section import plain_kinds
from astuner.errors import ConfigError

NUMERIC = [path for path, key in schema().keys.items() if {int, float} & set(plain_kinds(key.annotation))]
BETAS = parts("astuner.trainer_common.optim.betas")
SERVICE = ("astuner", "services", "one")
OF_SERVICES = [(*SERVICE, "timeout"), (*SERVICE, "restart"), (*SERVICE, "health", "port")]
KEYS = [*NUMERIC, BETAS, *OF_SERVICES]
HUGE = ["1" + "0" * 30, "-1" + "0" * 30, "1e308", "-1e308", "1e400", "-1e400", ".nan", ".inf", "-.inf"]
WILD = [
    "0", "-1", "0.5", "-0.5", "1e-300", "9223372036854775808", "4294967296", "0x7fffffffffffffffffff",
    "1_000_000_000_000", "'1e400'", "true", "five", "[]", "{}", "2026-01-01", "12:30:45",
]  # fmt: skip


def problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str) -> Mapping[KeyPath, str]:
    """Set every numeric key to `value`; return the problem with each rejected key, by its line."""
    monkeypatch.chdir(tmp_path)
    tree: dict[str, Any] = {}
    for key in KEYS:
        tree = with_value(tree, key, f"<{dotted(key)}>")
    tree = with_value(tree, (*SERVICE, "command"), "x")
    tree = with_value(tree, ("astuner", "model", "path"), "some/model")
    tree = with_value(tree, ("astuner", "rollout", "agentscope_workflow"), "agents->Agent")
    text = yaml.safe_dump(tree, sort_keys=False)
    lines = {}
    for key in KEYS:
        lines[key] = text[: text.index(f"<{dotted(key)}>")].count("\n") + 1
        text = text.replace(f"<{dotted(key)}>", f"[{value}, 0.5]" if key == BETAS else value)
    (tmp_path / "run.yaml").write_text(text)
    try:
        load_config(Path("run.yaml"))
    except ConfigError as error:
        found = [line.strip() for line in str(error).splitlines()]
        return {
            key: "\n".join(each)
            for key, line in lines.items()
            if (each := [text for text in found if text.startswith(f"run.yaml:{line}: ")])
        }
    return {}


@pytest.mark.parametrize("value", HUGE)
def test_numbers_that_no_library_takes_are_rejected_with_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    rejected = problems(tmp_path, monkeypatch, value)
    assert not set(KEYS) - set(rejected)
    bounds = ("at least", "at most", "greater than", "less than", "finite", "a whole number")
    for key, message in rejected.items():
        assert dotted(key) in message
        assert any(bound in message for bound in bounds), message


@pytest.mark.parametrize("value", WILD)
def test_a_rejected_value_is_named_with_the_expected_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    rejected = problems(tmp_path, monkeypatch, value)
    assert rejected or value in ("0.5",)
    for key, message in rejected.items():
        assert dotted(key).removeprefix("astuner.") in message
        assert any(word in message for word in ("expected", "lower", "at least", "write", "emove")), message


def test_a_number_that_python_does_not_read_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("astuner:\n  rollout:\n    num_repeat: " + "9" * 5000 + "\n")
    with pytest.raises(ConfigError, match=r"run.yaml:3: astuner.rollout.num_repeat is a number of 5,000 digits"):
        load_config(Path("run.yaml"))
    (tmp_path / "run.yaml").write_text("astuner: {}\n")
    with pytest.raises(ConfigError, match=r"command line: .*num_repeat.* 5,000 digits") as caught:
        load_config(Path("run.yaml"), ["astuner.rollout.num_repeat=" + "9" * 5000])
    assert len(str(caught.value)) < 1000


def test_a_step_has_a_limited_number_of_episodes(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("astuner: {}\n")
    with pytest.raises(ConfigError, match=r"100,000\) × astuner.rollout.num_repeat \(100,000\) .* at most 1,000,000"):
        load_config(
            tmp_path / "run.yaml", ["astuner.rollout.num_repeat=100000", "astuner.data.train_batch_size=100000"]
        )
