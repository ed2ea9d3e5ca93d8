"""`astuner check`: check a configuration without training, and print what the run would do."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.backbone.base import MemoryEstimate, PreflightContext, load_backbone
from astuner.backbone.episode_workers.rollout import with_workers
from astuner.backbone.training.episode_placement import has_agent
from astuner.backbone.training.progress import warn_if_slow
from astuner.backbone.training.run_inputs import (
    RunInputs,
    check_references,
    context_notice,
    greedy_validation_notice,
    load_run_inputs,
    validation_repeats,
)
from astuner.backbone.training.schedule import TaskOrder
from astuner.config.root import AstunerConfig
from astuner.errors import BackboneError, shorten
from astuner.launcher.console import filtered_output, make_console
from astuner.launcher.episode_table import check_rewards, episode_table, explain_no_training
from astuner.launcher.launch import Launcher
from astuner.llm_engine.vllm_server.installation import check_engine_packages
from astuner.run_record.loggers import check_loggers
from astuner.system.redaction import redact_argv
from astuner.task_reader import describe_left_out
from astuner.task_rollout import ActiveEpisodes
from astuner.viewer.transcripts import DEFAULT_SHOWN, Shown, print_transcripts

_MAX_TASKS = 2
_MAX_PARTS = 4


def check_run(launcher: Launcher, *, dry_run: bool, shown: Shown | None = None) -> None:
    """Load all inputs of a run, print its size, and roll out a few episodes if `dry_run`.

    Args:
        launcher: the launcher with the configuration.
        dry_run: whether to roll out episodes.
        shown: the transcripts of these episodes that are printed; None for the default number.

    Raises:
        AstunerError: an error that the run would have as well.
    """
    launcher.log_notices()
    console = make_console()
    config = launcher.config.astuner
    check_references(config, launcher.config_dir, launcher.origins)  # before transformers is imported
    with filtered_output(), contextlib.ExitStack() as stack:
        check_loggers(config.trainer_common.logger)
        backbone = load_backbone(config.backbone)
        check_engine_packages(config)
        backbone.check_config(launcher.config, launcher.origins, launcher.services.ray, trains=True)
        stack.enter_context(launcher.services.running())
        with warn_if_slow("read_tasks", config.deadlines, ActiveEpisodes()):
            run_inputs = load_run_inputs(config, launcher.config_dir, env_service=launcher.services.env_service)
        run_inputs = stack.enter_context(with_workers(config, run_inputs))
        folder = Path(config.experiment_dir)
        backbone.preflight(
            PreflightContext(launcher.config, run_inputs, folder, launcher.origins, launcher.services.ray)
        )
        _print_inputs(console, launcher, run_inputs)
        _print_size(console, config, run_inputs)
        estimate = backbone.estimate(config, run_inputs)
        _print_memory(console, estimate)
        _check_memory(estimate)
        if dry_run:  # which looks for faults in the inputs, too
            episodes = launcher.dry_run(run_inputs)
            print_transcripts(console, episodes, DEFAULT_SHOWN if shown is None else shown)
            console.print(episode_table("dry run", episodes))
            check_rewards(episodes)
            if (reason := explain_no_training(episodes)) is not None:
                raise BackboneError(reason)
        else:
            launcher.services.start_ray()
            run_inputs.monitor(config, lambda _: None, trains=True).check_start()
        console.print("[green]OK[/]: this configuration can run")


def _print_inputs(console: Console, launcher: Launcher, run_inputs: RunInputs) -> None:
    config, tasks = launcher.config.astuner, run_inputs.tasks
    auto = f" (auto: {launcher.backbone_reason})" if launcher.backbone_reason else ""
    algorithm = config.trainer_common.algorithm.adv_estimator
    console.print(f"backbone   {config.backbone}{auto}, {algorithm}", soft_wrap=True)
    console.print(
        f"model      {escape(run_inputs.model_path)} (vocabulary of {len(run_inputs.tokenizer)}, "
        f"renderer {run_inputs.codec.renderer_name})",
        soft_wrap=True,
    )
    if (notice := context_notice(config, run_inputs)) is not None:
        console.print(f"           {notice}", soft_wrap=True)
    if algorithm != "sft" and has_agent(config):
        command = config.workflow.command
        if not config.rollout.use_agentscope_protocol:
            agent, returned = "the built-in agent loop", "the environment rewards each step"
        elif command is None:
            agent, returned = str(config.rollout.agentscope_workflow), "the workflow returns its reward"
        else:
            agent, returned = shlex.join(redact_argv(command)), "the command's last line is the reward"
        console.print(escape(f"workflow   {agent}"), soft_wrap=True)
        judge = config.task_judge.judge_protocol or f"none: {returned}"
        if run_inputs.rubrics is not None:
            judge = f"{run_inputs.rubrics.name}: {len(run_inputs.rubrics.rubrics)} learned rubrics"
        console.print(escape(f"judge      {judge}"), soft_wrap=True)
    skipped = f", {tasks.skipped_rows} invalid rows skipped" if tasks.skipped_rows else ""
    console.print(f"tasks      {len(tasks.training)} for training, {len(tasks.validation)} for validation{skipped}")
    if tasks.left_out:
        console.print(escape(f"           filters left out {describe_left_out(tasks.left_out)}"), soft_wrap=True)
    for task in tasks.training[:_MAX_TASKS]:
        console.print(escape(f"           {shorten(task.task_id)}: {task.main_query[:100]!r}"), soft_wrap=True)


def _print_size(console: Console, config: AstunerConfig, run_inputs: RunInputs) -> None:
    common, repeats = config.trainer_common, config.rollout.num_repeat
    order = TaskOrder.from_config(config, run_inputs.tasks)
    batch = min(config.data.train_batch_size, len(run_inputs.tasks.training))
    steps = order.total_steps(common.total_epochs, common.total_training_steps)
    if common.algorithm.adv_estimator == "sft":
        updates_per_step = 1
        console.print(f"step       {batch} transcripts → 1 optimizer step")
    else:
        updates_per_step = common.mini_batch_num
        episodes = batch * repeats
        samples = episodes * config.rollout.multi_turn.expected_steps
        console.print(
            f"step       {batch} tasks × {repeats} repeats → {episodes} episodes → about {samples} samples "
            f"→ {updates_per_step} optimizer steps",
            soft_wrap=True,
        )
        validations = -(-steps // common.test_freq) + common.val_before_train
        episodes = len(run_inputs.tasks.validation) * validation_repeats(config)
        console.print(f"validation {episodes} episodes, {validations} times")
        if run_inputs.tasks.validation and (notice := greedy_validation_notice(config)) is not None:
            console.print(f"           {notice}", soft_wrap=True)
    console.print(
        f"run        {steps} steps ({order.steps_per_epoch} per epoch), {steps * updates_per_step} optimizer steps"
    )


def _print_memory(console: Console, estimate: MemoryEstimate) -> None:
    excluded = f", without {estimate.excluded}" if estimate.excluded else f", in the {estimate.peak}"
    total, available = format_size(estimate.total), format_size(estimate.available)
    console.print(f"memory     about {total} of {available} at the peak{excluded}", soft_wrap=True)
    if estimate.parameters:
        console.print(f"           {estimate.parameters:,} weights, {estimate.trained:,} of them trained")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for part in estimate.parts:
        if part.size:
            table.add_row(f"           {part.name}", format_size(part.size))
    console.print(table)


def _check_memory(estimate: MemoryEstimate) -> None:
    """Check that the estimate fits.

    Raises:
        BackboneError: it does not fit. The message names the largest parts and the keys that make them smaller.
    """
    if estimate.total <= estimate.available:
        return
    largest = sorted(estimate.parts, key=lambda part: -part.size)[:_MAX_PARTS]
    lines = "".join(f"\n  {part.name}: {format_size(part.size)}; {part.fix}" for part in largest)
    raise BackboneError(
        f"the run needs about {format_size(estimate.total)} of memory, and this machine has "
        f"{format_size(estimate.available)}. The largest parts, and what makes them smaller:{lines}"
    )


def format_size(size: int) -> str:
    """Return a number of bytes in MiB or GiB."""
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:,.2f} GiB" if size < 2**50 else "more than 1 PiB"
