"""Every backbone makes the same samples of the same episodes.

Each of them runs in the environment that has it, and is compared with the local backbone there. Sampling is greedy: a
Tinker server draws other random numbers than an engine in process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from astuner import AstunerJob
from astuner.run_record import read_episode, read_index
from astuner.schema import Episode
from tests.preloaded import run_astuner

AGENTS = Path(__file__).with_name("parity_agents.py")
TASKS, REPEATS = 3, 4
PATIENCE = 900.0


def rolled_out(backbone: str, model: Path, folder: Path) -> list[Episode]:
    """Run the episodes of a few tasks with the command; return them as the record has them."""
    folder.mkdir(exist_ok=True)
    rows = [{"question": f"question {number}", "answer": ""} for number in range(TASKS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    job = AstunerJob(
        algorithm="grpo",
        model=model,
        experiment_name=backbone,
        backbone=backbone,
        model__renderer="qwen3",
        model__dtype="float32",
        debug__debug_first_n_tasks=TASKS,
        debug__debug_vllm_seed=42,
        rollout__num_repeat=REPEATS,
        rollout__temperature=0.0,
        rollout__max_response_length_in_one_turn=12,
        rollout__max_model_len=400,
        rollout__compute_madness_checklist=[],
        trainer_common__device="cpu",
    )
    job.set_workflow(f"{AGENTS}->Scripted").set_data("file", folder / "train.jsonl")
    conf, records = job.dump_job_as_yaml(folder / f"{backbone}.yaml"), folder / "records"
    words = ("check", "--dry-run", "--conf", str(conf), "--exp-dir", str(records))
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    if backbone in ("debug", "local"):
        done = run_astuner(*words, cwd=folder, env=environment, timeout=PATIENCE)
    else:  # some variables act at an interpreter's start only
        command = [sys.executable, "-m", "astuner", *words]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=environment, cwd=folder, timeout=PATIENCE
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    record = records / f"{backbone}-check"
    return [read_episode(record / entry.path) for entry in read_index(record)]


def printed(episodes: list[Episode]) -> str:
    """Return the training data of the episodes, without logprobs, in a canonical order and form."""
    lines: list[dict[str, Any]] = []
    for episode in sorted(episodes, key=lambda item: (item.task.main_query, item.repeat_index)):
        numbers = {call.call_id: number for number, call in enumerate(episode.calls)}
        samples = [
            {
                "token_ids": tuple(sample.token_ids),
                "train_counts": tuple(sample.train_counts),
                "position_ids": tuple(sample.position_ids),
                "weight": round(sample.weight, 9),
                "spans": [(numbers[span.call_id], span.start, span.end) for span in sample.spans],
            }
            for sample in episode.samples
        ]
        lines.append(
            {
                "task": episode.task.main_query,
                "repeat": episode.repeat_index,
                "status": episode.status,
                "reward": episode.reward,
                "versions": sorted({call.policy_version for call in episode.calls}),
                "samples": samples,
            }
        )
    return "\n".join(json.dumps(item) for item in lines)


def logprobs(episodes: list[Episode]) -> list[float]:
    """Of all samples, in that order."""
    ordered = sorted(episodes, key=lambda item: (item.task.main_query, item.repeat_index))
    return [value for episode in ordered for sample in episode.samples for value in sample.logprobs]


@pytest.fixture(scope="module")
def local(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Episode]:
    """The local backbone's."""
    return rolled_out("local", model_folder, tmp_path_factory.mktemp("local"))


def test_the_script_has_what_can_differ(local: list[Episode]) -> None:
    assert len(local) == TASKS * REPEATS
    assert {episode.status for episode in local} == {"ok"}
    assert any(len(episode.samples) > 1 for episode in local)
    assert any(len(sample.spans) > 1 for episode in local for sample in episode.samples)
    assert len({episode.samples[0].token_ids for episode in local}) > TASKS


@pytest.mark.parametrize(
    "backbone",
    [
        "debug",
        pytest.param("verl", marks=[pytest.mark.verl, pytest.mark.slow]),
        pytest.param("trinity", marks=pytest.mark.trinity),
    ],
)
def test_a_backbone_prints_the_samples_that_local_prints(
    backbone: str, local: list[Episode], model_folder: Path, tmp_path: Path
) -> None:
    other = rolled_out(backbone, model_folder, tmp_path)
    assert printed(other) == printed(local)
    assert logprobs(other) == pytest.approx(logprobs(local), abs=1e-4)
