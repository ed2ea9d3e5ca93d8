"""Creation of judges from their path and parameters."""

from __future__ import annotations

from pathlib import Path

import pytest

from astuner.config.data import TaskJudgeConfig
from astuner.errors import PluginError
from astuner.task_judge.judge_base import judge_paths, make_judge

CODE = """
from astuner.task_judge.judge_base import BaseJudge

class Scaled(BaseJudge):
    def __init__(self, config, *, scale, offset=0.0):
        super().__init__(config)
        if scale < 0:
            raise ValueError("scale is negative")
        self.scale, self.offset = scale, offset

    def compute_reward(self, workflow_task, workflow_output):
        return self.scale, True

class Plain(BaseJudge):
    def compute_reward(self, workflow_task, workflow_output):
        return 1.0, True

class Open(BaseJudge):
    def __init__(self, config, **options):
        super().__init__(config)
        self.options = options

    def compute_reward(self, workflow_task, workflow_output):
        return 1.0, True
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "scaled_judges.py").write_text(CODE)
    return tmp_path


def test_parameters_reach_the_constructor(folder: Path) -> None:
    config = TaskJudgeConfig()
    judge = make_judge("scaled_judges->Scaled", config, {"scale": 2.0}, [folder])
    assert (judge.scale, judge.offset, judge.config) == (2.0, 0.0, config)  # type: ignore[attr-defined]
    assert make_judge("scaled_judges->Open", config, {"any": 1}, [folder]).options == {"any": 1}  # type: ignore[attr-defined]
    assert type(make_judge("scaled_judges->Plain", config, {}, [folder])).__name__ == "Plain"


@pytest.mark.parametrize(
    ("name", "params", "message"),
    [
        (
            "Scaled",
            {"scale": 1, "ofset": 2},
            r"task_judge.params: .* no parameter 'ofset'; it has scale, offset.*offset\?",
        ),
        ("Scaled", {"offset": 1}, r"task_judge.params: .* needs scale; it has scale, offset"),
        ("Plain", {"scale": 1}, r"no parameter 'scale'; it has none"),
        (
            "Scaled",
            {"scale": -1},
            r"could not be created .* ValueError: scale is negative \(at .*scaled_judges.py:\d+\)",
        ),
    ],
)
def test_wrong_parameters_are_named(folder: Path, name: str, params: dict[str, object], message: str) -> None:
    with pytest.raises(PluginError, match=message):
        make_judge(f"scaled_judges->{name}", TaskJudgeConfig(), params, [folder])


def test_the_paths_of_all_judges_are_known_before_any_is_imported() -> None:
    inner = {"gate": {"judge_protocol": "gate->Gate"}, "judge": {"judge_protocol": "b->B", "params": {"x": [1]}}}
    params = {
        "judges": {"a": {"judge_protocol": "a->A", "weight": 2}, "b": {"judge_protocol": "c->C", "params": inner}}
    }
    config = TaskJudgeConfig(judge_protocol="all->All", params=params)
    assert judge_paths(config) == ["all->All", "a->A", "c->C", "gate->Gate", "b->B"]
    assert judge_paths(TaskJudgeConfig()) == []
