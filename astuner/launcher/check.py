"""`astuner check`: what a run would do, and what is wrong, before it is started."""

from __future__ import annotations

import math
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.backbone.base import MemoryEstimate, Prospect, check_engine, load_backbone
from astuner.backbone.ingredients import Ingredients, gather, validation_repeats
from astuner.backbone.phases import watched
from astuner.backbone.task_order import TaskOrder
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError
from astuner.launcher.console import make_console
from astuner.launcher.episode_table import episode_table, refuse_unrewarded, why_nothing_trains
from astuner.launcher.launch import Launch
from astuner.launcher.output import tidy_output
from astuner.run_record import check_loggers
from astuner.task_rollout import RunningEpisodes

_SHOWN_TASKS = 2


def check_launch(launch: Launch, *, dry_run: bool) -> None:
    """Load everything that the run would load, print the arithmetic, and roll out a few episodes if asked.

    Raises:
        AstunerError: whatever would stop the run.
    """
    launch.announce()
    console = make_console()
    with tidy_output(), launch.services.running():
        _check(console, launch, dry_run=dry_run)


def _check(console: Console, launch: Launch, *, dry_run: bool) -> None:
    config = launch.config.astuner
    backbone = load_backbone(config.backbone)
    check_engine(config)
    check_loggers(config.trainer_common.logger)
    with watched("read_tasks", config.deadlines, RunningEpisodes()):
        ingredients = gather(config, launch.config_dir)
    folder = Path(config.experiment_dir)
    backbone.refuse(Prospect(launch.config, ingredients, folder, launch.origins, launch.services.ray))
    _print_ingredients(console, config, ingredients)
    _print_arithmetic(console, config, ingredients)
    where = "the server at debug.base_url" if config.backbone == "debug" else "other processes, not looked into"
    _print_memory(console, backbone.estimate(config, ingredients.model_path), where)
    if dry_run:
        episodes = launch.dry_run(ingredients)
        console.print(episode_table("dry run", episodes))
        refuse_unrewarded(episodes)
        if (nothing := why_nothing_trains(episodes)) is not None:
            raise BackboneError(nothing)
    console.print("[green]all right[/]: this configuration can run")


def _print_ingredients(console: Console, config: AstunerConfig, ingredients: Ingredients) -> None:
    tasks = ingredients.tasks
    console.print(f"backbone   {config.backbone}, {config.trainer_common.algorithm.adv_estimator}")
    console.print(
        f"model      {escape(ingredients.model_path)} (vocabulary of {len(ingredients.tokenizer)}, "
        f"renderer {ingredients.codec.renderer_name})",
        soft_wrap=True,
    )
    if ingredients.workflow is not None:
        console.print(escape(f"workflow   {config.rollout.agentscope_workflow}"), soft_wrap=True)
        judge = config.task_judge.judge_protocol or "none: the workflow returns its reward"
        console.print(escape(f"judge      {judge}"), soft_wrap=True)
    skipped = f", {tasks.skipped_rows} bad rows skipped" if tasks.skipped_rows else ""
    console.print(f"tasks      {len(tasks.training)} for training, {len(tasks.validation)} for validation{skipped}")
    for task in tasks.training[:_SHOWN_TASKS]:
        console.print(escape(f"           {task.task_id}: {task.main_query[:100]!r}"), soft_wrap=True)


def _print_arithmetic(console: Console, config: AstunerConfig, ingredients: Ingredients) -> None:
    common, repeats = config.trainer_common, config.rollout.num_repeat
    order = TaskOrder(ingredients.tasks.training, config.data.train_batch_size, None)
    batch = min(config.data.train_batch_size, len(ingredients.tasks.training))
    steps = order.total_steps(common.total_epochs, common.total_training_steps)
    per_step = 1 if common.algorithm.adv_estimator == "sft" else common.mini_batch_num
    if common.algorithm.adv_estimator == "sft":
        console.print(f"a step     {batch} transcripts → 1 optimiser step")
    else:
        episodes = batch * repeats
        samples = episodes * config.rollout.multi_turn.expected_steps
        console.print(
            f"a step     {batch} tasks × {repeats} repeats → {episodes} episodes → about {samples} samples "
            f"→ {common.mini_batch_num} optimiser steps",
            soft_wrap=True,
        )
        validations = math.ceil(steps / common.test_freq) + common.val_before_train
        per_validation = len(ingredients.tasks.validation) * validation_repeats(config)
        console.print(f"validation {per_validation} episodes, {validations} times")
    console.print(f"the run    {steps} steps ({order.steps_per_epoch} an epoch), {steps * per_step} optimiser steps")


def _print_memory(console: Console, estimate: MemoryEstimate | None, elsewhere: str) -> None:
    if estimate is None:
        console.print(f"memory     that of {elsewhere}")
        return
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, size in estimate.parts.items():
        if size:
            table.add_row(f"           {name}", _readable(size))
    console.print(f"memory     about {_readable(estimate.total)} of {_readable(estimate.available)} at the peak")
    console.print(f"           {estimate.parameters:,} weights, {estimate.trained:,} of them trained")
    console.print(table)
    if estimate.total > estimate.available:
        console.print(
            "[yellow]this will hardly fit[/]: lower trainer_common.max_tokens_per_micro_batch, set "
            "model.gradient_checkpointing, or train adapters (model.lora.rank: 16)",
            soft_wrap=True,
        )


def _readable(size: int) -> str:
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"
