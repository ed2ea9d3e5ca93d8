"""Ordinary runs, in which a finding is a false alarm."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bench.faults.runs import AGENTS, CLEAN_AGENTS, Run, math_run, tasks


def _math(folder: Path, steps: int, keys: Mapping[str, Any], change: Callable[[Run], None] | None = None) -> Run:
    """Return a run of the math agent."""
    run = math_run(folder, steps)
    run.training = [row for row in tasks(200, seed=2) if row not in run.validation]
    run.keys |= {"trainer_common.total_epochs": 100} | dict(keys)
    if change is not None:
        change(run)
    return run


def _small(folder: Path, steps: int, keys: Mapping[str, Any], change: Callable[[Run], None] | None = None) -> Run:
    """Return a run with a random model of 50,000 weights, which is far from solving anything."""
    from tests.conftest import conversation, saved_model
    from tutorial.tiny_tokenizer import build_tokenizer

    rng = random.Random(0)
    tokenizer = build_tokenizer([conversation(rng) for _ in range(50)], context=512)
    (folder / "small").mkdir()
    run = _math(
        folder,
        steps,
        {
            "model.renderer": "auto",
            "task_judge.judge_protocol": None,
            "rollout.agentscope_workflow": f"{CLEAN_AGENTS}->Letters",
            "rollout.max_response_length_in_one_turn": 48,
            "rollout.max_model_len": 512,
            "data.max_prompt_length": 256,
            "data.max_response_length": 256,
            "rollout.num_repeat": 4,
        }
        | dict(keys),
        change,
    )
    run.model = saved_model(tokenizer, folder / "small", hidden_size=32, head_dim=16)
    return run


def _with_choices(run: Run) -> None:
    run.training = [
        {**row, "choices": [row["answer"], str(int(row["answer"]) + 1), str(int(row["answer"]) - 3)]}
        for row in run.training
    ]


def _workflow(name: str, **keys: Any) -> dict[str, Any]:
    named = {key.replace("__", "."): value for key, value in keys.items()}
    return {"rollout.agentscope_workflow": f"{CLEAN_AGENTS}->{name}", **named}


_Make = Callable[[Path, int], Run]


def _kinds() -> dict[str, tuple[int, _Make]]:
    """Return the clean runs, with the share of the steps of each in percent."""

    def math(**keys: Any) -> _Make:
        named = {key.replace("__", "."): value for key, value in keys.items()}
        return lambda folder, steps: _math(folder, steps, named)

    def small(name: str, **keys: Any) -> _Make:
        return lambda folder, steps: _small(folder, steps, _workflow(name, **keys))

    near = f"{CLEAN_AGENTS}->Near"
    lora = {"model__lora__rank": 8, "trainer_common__optim__lr": 1e-3}
    return {
        # From 0.5 to all solved: the late steps have no signal, and answers that hardly vary.
        "math to the end": (8, math(trainer_common__optim__lr=1e-3)),
        "math, continuous reward, two mini-batches": (
            4,
            math(task_judge__judge_protocol=near, trainer_common__mini_batch_num=2),
        ),
        "math, LoRA": (5, math(**lora)),
        "math, groups of two, RLOO": (4, math(rollout__num_repeat=2, trainer_common__algorithm__adv_estimator="rloo")),
        "math, DAPO, cosine": (
            3,
            math(trainer_common__algorithm__adv_estimator="dapo", trainer_common__optim__lr_scheduler="cosine"),
        ),
        "math, tool with mistakes of the caller": (3, math(rollout__agentscope_workflow=f"{CLEAN_AGENTS}->ClumsyTool")),
        "math, choices": (
            3,
            lambda folder, steps: _math(folder, steps, _workflow("RepeatsQuestion"), _with_choices),
        ),
        "math, KL": (3, math(trainer_common__use_kl_loss=True, trainer_common__kl_loss_coef=0.05)),
        "walk": (5, lambda folder, steps: _small(folder, steps, {"rollout.agentscope_workflow": f"{AGENTS}->Walk"})),
        "letters": (12, small("Letters")),
        "letters, GSPO, bfloat16": (
            5,
            small("Letters", trainer_common__algorithm__adv_estimator="gspo", model__dtype="bfloat16"),
        ),
        "letters, REINFORCE++, linear with warm-up": (
            6,
            small(
                "Letters",
                trainer_common__algorithm__adv_estimator="reinforce++",
                trainer_common__optim__lr_scheduler="linear",
                trainer_common__optim__lr_warmup_steps=3,
            ),
        ),
        "letters, CISPO, groups of two": (
            5,
            small("Letters", rollout__num_repeat=2, trainer_common__algorithm__adv_estimator="cispo"),
        ),
        "letters, Dr. GRPO, LoRA": (5, small("Letters", trainer_common__algorithm__adv_estimator="dr_grpo", **lora)),
        "letters, long answers": (5, small("Letters", rollout__max_response_length_in_one_turn=96)),
        "letters, temperature 0.7": (5, small("Letters", rollout__temperature=0.7)),
        "debate of two agents": (6, small("Debate")),
        "forked histories": (5, small("Forgetful")),
        "hopeless": (4, small("Hopeless")),
        "flaky": (2, small("Flaky")),
        "tools that the model cannot use yet": (2, small("ToolOnce", data__max_prompt_length=400)),
    }


def clean_runs(steps: int) -> dict[str, Callable[[Path], Run]]:
    """Return runs that have `steps` steps together."""
    kinds = _kinds()
    total = sum(share for share, _ in kinds.values())
    assert total == 100, total
    counts = {name: steps * share // 100 for name, (share, _) in kinds.items()}
    counts["letters"] += steps - sum(counts.values())
    return {name: functools.partial(make, steps=counts[name]) for name, (_, make) in kinds.items() if counts[name]}
