"""Recipes of the Tinker cookbook, unchanged, on a tiny model: each runs as its own command against the server.

The recipes run with the interpreter `ASTUNER_COOKBOOK_PYTHON`, which has tinker-cookbook 0.6.1; `.ci/frameworks` makes
one. They read data sets of the Hugging Face Hub. `datasets` first looks for a folder of the data set's name, so the
recipes find generated data of the same form there.
"""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from astuner.tinker_server.trainable_model import BaseLanguageModel
from tests.conftest import saved_model
from tests.tinker_server.served import Served, serving

PYTHON = os.environ.get("ASTUNER_COOKBOOK_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON, reason="ASTUNER_COOKBOOK_PYTHON names no interpreter with tinker-cookbook"),
]

MODEL = "Qwen/Qwen3-8B-Base"
"""A name that the cookbook knows. Its format of conversations is `User: …`, `Assistant: …`."""
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
TIMEOUT_SECONDS = 1800


@dataclass(frozen=True)
class Recipe:
    """A recipe with the arguments of a short run.

    Attributes:
        arguments: the arguments besides those that all recipes have.
        steps: the number of steps that it logs.
        metric: a metric that each step logs.
        falls: whether the last value of the metric is below the first.
        checkpoints: the names of the checkpoints that it leaves on the server.
    """

    arguments: tuple[str, ...]
    steps: int
    metric: str
    falls: bool
    checkpoints: frozenset[str]


FINAL = frozenset({"final"})
RECIPES = {
    "rl_loop": Recipe(
        (
            "batch_size=4",
            "group_size=8",
            "max_tokens=24",
            "learning_rate=1e-3",
            "loss_fn=importance_sampling",
            "max_steps=3",
            "save_every=2",
        ),
        3,
        "optim/grad_norm",
        False,
        frozenset({"000002", "final"}),
    ),
    "sl_loop": Recipe(
        ("batch_size=8", "max_length=256", "learning_rate=1e-2", "max_steps=6", "save_every=4"),
        6,
        "train_mean_nll",
        True,
        frozenset({"000004", "final"}),
    ),
    # Its batches have 128 conversations.
    "sl_basic": Recipe(("learning_rate=1e-2", "max_steps=2", "eval_every=1"), 2, "train_mean_nll", True, FINAL),
    "math_rl.train": Recipe(
        ("env=arithmetic", "groups_per_batch=4", "group_size=4", "loss_fn=ppo", "max_steps=2", "eval_every=0"),
        2,
        "env/all/reward/total",
        False,
        FINAL,
    ),
    "prompt_distillation.train": Recipe(
        ("file_path=conversations.jsonl", "batch_size=8", "learning_rate=1e-2", "max_steps=6"),
        6,
        "train_mean_nll",
        True,
        FINAL,
    ),
    "preference.dpo.train": Recipe(
        ("dataset=hhh", "batch_size=4", "learning_rate=1e-2", "max_length=256", "max_steps=4"),
        4,
        "dpo_loss",
        True,
        FINAL,
    ),
    "preference.shorter.train": Recipe(
        ("renderer_name=role_colon", "batch_size=2", "group_size=4", "max_tokens=16", "max_steps=2", "eval_every=0"),
        2,
        "env/all/reward/total",
        False,
        FINAL,
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_runs_unchanged(cookbook_server: Served, workplace: Path, name: str):
    recipe, folder = RECIPES[name], workplace / "runs" / name
    before = {checkpoint.path for checkpoint in cookbook_server.service.store.checkpoints()}
    command = [PYTHON, "-m", f"tinker_cookbook.recipes.{name}", f"model_name={MODEL}", f"log_path={folder}"]
    environment = {
        "TINKER_BASE_URL": cookbook_server.url,
        "TINKER_API_KEY": "tml-for-tests",
        "TINKER_COOKBOOK_RUNS_DIR": str(workplace / "runs"),
        "HF_HOME": str(workplace / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    ended = subprocess.run(
        [*command, *recipe.arguments],
        check=False,
        cwd=workplace,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert ended.returncode == 0, ended.stdout[-5000:]
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    values = [line[recipe.metric] for line in logged if recipe.metric in line]
    assert len(values) == recipe.steps, (recipe.metric, logged)
    assert all(math.isfinite(value) for value in values)
    if recipe.falls:
        assert values[-1] < values[0]
    saved = [item for item in cookbook_server.service.store.checkpoints() if item.path not in before]
    assert {item.name for item in saved if item.kind == "weights" and not item.ephemeral} >= recipe.checkpoints


@pytest.fixture(scope="module")
def workplace(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the model and the data, in which the recipes run."""
    folder = tmp_path_factory.mktemp("cookbook")
    rng = random.Random(0)
    make_model(tokenizer, folder / MODEL)
    sums = [(a, b) for a in range(5) for b in range(5)]
    problems = [
        {"question": f"What is {a} + {b}?", "answer": f"{a}+{b}=<<{a}+{b}={a + b}>>{a + b}\n#### {a + b}"}
        for a, b in sums
    ]
    write_dataset(folder / "openai/gsm8k", "main", rng.sample(problems, 25))
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"What is {rng.randrange(10)} + {rng.randrange(10)}?"},
                {"role": "assistant", "content": "I do not know."},
            ]
        }
        for _ in range(256)
    ]
    write_dataset(folder / "HuggingFaceH4/no_robots", "default", chats)
    pairs = [
        {
            "chosen": f"\n\nHuman: What is {a} + {b}?\n\nAssistant: \\boxed{{{a + b}}}",
            "rejected": f"\n\nHuman: What is {a} + {b}?\n\nAssistant: \\boxed{{0}}",
        }
        for a, b in sums[1:]
    ]
    write_dataset(folder / "Anthropic/hh-rlhf", "default", pairs)
    (folder / "conversations.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return folder


@pytest.fixture(scope="module")
def cookbook_server(workplace: Path) -> Iterator[Served]:
    """A server with the model of the recipes, named as `astuner serve-tinker --model Qwen/Qwen3-8B-Base` names it."""
    folder = str(workplace / MODEL)
    base_model = BaseLanguageModel(folder, (folder, MODEL), "cpu", "float32")
    with serving(base_model, workplace / "checkpoints") as served:
        yield served


def write_dataset(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    """Write a data set with one configuration and the splits train and test."""
    folder.mkdir(parents=True)
    splits = "".join(f"  - split: {split}\n    path: {split}.jsonl\n" for split in ("train", "test"))
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{splits}---\n")
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def make_model(tokenizer: Any, folder: Path) -> None:
    """Write a tiny model that answers a question with a random digit, so that some answers are right."""
    saved_model(tokenizer, folder, hidden_size=64, head_dim=32, context=2048)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adam = torch.optim.AdamW(model.parameters(), lr=3e-3)
    rng = random.Random(1)
    for _ in range(150):
        rows = []
        for _ in range(8):
            shots = rng.choice(["", f"User: How many r's are in strawberry?{SUFFIX}\n\nAssistant: \\boxed{{3}}\n\n"])
            question = (
                f"User: What is {rng.randrange(10)} + {rng.randrange(10)}?{rng.choice(['', SUFFIX])}\n\nAssistant:"
            )
            answer = f" \\boxed{{{rng.randrange(10)}}}\n\nUser:"
            rows.append([tokenizer.encode(text, add_special_tokens=False) for text in (shots + question, answer)])
        length = max(len(prompt) + len(answer) for prompt, answer in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        labels = torch.full_like(ids, -100)
        for place, (prompt, answer) in enumerate(rows):
            ids[place, : len(prompt) + len(answer)] = torch.tensor([*prompt, *answer])
            labels[place, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        model(input_ids=ids, labels=labels).loss.backward()
        adam.step()
        adam.zero_grad()
    model.save_pretrained(folder)
