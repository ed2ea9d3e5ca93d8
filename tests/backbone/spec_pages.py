"""The spec's configurations in a user's folder, with what a machine without a network and GPUs has to change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from astuner.run_record import read_index
from tests.preloaded import run_astuner

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests/config/data"
RUN_LIMIT_S = 500


def write_project(folder: Path, model: Path) -> None:
    """Write the projects of spec 2 (`math_agent/`) and spec 3 (`full.yaml`), GSM8K's folder, and a model."""
    shutil.copytree(model, folder / "model")
    config = json.loads((folder / "model/config.json").read_text())
    # The agent's prompts need a longer context. Positions are rotary, so it needs no additional weights.
    (folder / "model/config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    (folder / "math_agent").mkdir()
    agent = ROOT / "tutorial/example_math_agent/math_agent.py"
    shutil.copy(agent, folder / "math_agent/math_agent.py")
    shutil.copy(agent, folder / "agent.py")
    shutil.copy(DATA / "spec2_math_agent.yaml", folder / "math_agent/math_agent.yaml")
    shutil.copy(DATA / "spec3_appendix.yaml", folder / "full.yaml")
    (folder / "gsm8k/main").mkdir(parents=True)
    for start, split in ((10, "train"), (20, "test")):
        rows = [{"question": f"What is {n} + {n}?", "answer": f"Add. #### {2 * n}"} for n in range(start, start + 4)]
        (folder / f"gsm8k/main/{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


SHORT = (
    "astuner.model.path=model",
    "astuner.data.train_batch_size=2",
    "astuner.rollout.max_response_length_in_one_turn=8",
    "astuner.rollout.max_env_worker=2",
    "astuner.trainer_common.total_training_steps=1",
)
SPEC_2 = ("--conf", "math_agent/math_agent.yaml", *SHORT)
SPEC_3 = (
    "--conf",
    "full.yaml",
    *SHORT,
    "astuner.rollout.agentscope_learn_protocol=agent->MathAgentWorkflow",
    "astuner.task_judge.judge_protocol=astuner.task_judge.math_answer_as_judge->MathAnswerAsJudge",
    "astuner.task_reader.type=dataset_file",
    "astuner.task_reader.dataset_file.training.file_path=gsm8k/main/train.jsonl",
    "astuner.task_reader.dataset_file.validation.file_path=gsm8k/main/test.jsonl",
    "astuner.trainer_common.n_gpus_per_node=1",
    "astuner.trainer_common.logger=[console]",
)
PAGES = {"spec 2": (SPEC_2, "math_agent"), "spec 3": (SPEC_3, "full")}


def check_run(folder: Path, page: str, *options: str) -> str:
    """Run a page's configuration with options in `folder`; check the episodes of its record, and return the output."""
    words, name = PAGES[page]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    if {"--backbone=debug", "--backbone=local"} & {*options}:
        ended = run_astuner(*words, *options, cwd=folder, env=environment, timeout=RUN_LIMIT_S)
    else:  # some variables act at an interpreter's start only
        command = [sys.executable, "-m", "astuner", *words, *options]
        ended = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
        )
    output = ended.stdout + ended.stderr
    assert ended.returncode == 0, output
    suffix = "-debug" if "--backbone=debug" in options else ""
    entries = read_index(folder / "launcher_record" / f"{name}{suffix}")
    training = [entry for entry in entries if entry.split == "train"]
    assert [entry.status for entry in training] == ["ok"] * 8, output
    return output
