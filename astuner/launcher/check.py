"""`astuner check`: check a configuration without training, and print what the run would do.

With `--machine`, it prints the memory on each GPU of a machine that is not at hand.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from astuner.backbone.base import MemoryEstimate, MemoryPart, PreflightContext, load_backbone
from astuner.backbone.training.episode_placement import has_agent
from astuner.backbone.training.run_inputs import (
    RunInputs,
    check_references,
    context_notice,
    greedy_validation_notice,
    model_path,
    validation_repeats,
)
from astuner.backbone.training.schedule import TaskOrder
from astuner.config.keys import KeyPath
from astuner.config.loading import load_config, resolve_names
from astuner.config.root import AstunerConfig, RunConfig
from astuner.errors import BackboneError, ConfigError, shorten
from astuner.launcher.console import check_rewards, episode_table, explain_no_training, filtered_output, make_console
from astuner.launcher.launch import Launcher, prepare_process
from astuner.llm_engine.vllm_server.installation import check_engine_packages
from astuner.run_record.loggers import check_loggers
from astuner.system.gpus import Machine, described_gpus
from astuner.system.redaction.redactor import redact_argv
from astuner.task_reader import describe_left_out
from astuner.task_rollout.active_episodes import ActiveEpisodes
from astuner.viewer.transcripts import DEFAULT_SHOWN, Shown, print_transcripts

_MAX_TASKS = 2
_MAX_PARTS = 4


def check_run(launcher: Launcher, *, dry_run: bool, shown: Shown | None = None) -> None:
    """Load all inputs of a run, print its size, and roll out a few episodes if `dry_run`; `shown` are printed.

    AstunerError: an error that the run would have as well.
    """
    prepare_process()
    launcher.log_notices()
    console = make_console()
    config = launcher.config.astuner
    check_references(config, launcher.config_dir, launcher.origins)  # before transformers is imported
    with filtered_output(), contextlib.ExitStack() as stack:
        check_loggers(launcher.loggers)
        backbone = load_backbone(config.backbone)
        check_engine_packages(config)
        backbone.check_config(launcher.config, launcher.origins, launcher.services.ray, trains=True)
        run_inputs = launcher.start_services_and_load(launcher.load_inputs, ActiveEpisodes(), stack)
        folder = Path(config.experiment_dir)
        backbone.preflight(
            PreflightContext(launcher.config, run_inputs, folder, launcher.origins, launcher.services.ray)
        )
        _print_inputs(console, launcher, run_inputs)
        _print_size(console, config, run_inputs)
        estimate = backbone.estimate(config, run_inputs)
        _print_memory(console, estimate)
        if estimate.total > estimate.available:
            raise BackboneError(
                f"the run needs about {_size_text(estimate.total)} of memory, and this machine has "
                f"{_size_text(estimate.available)}. {_largest_parts(estimate.parts)}"
            )
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
    if not config.is_supervised and has_agent(config):
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
    if config.is_supervised:
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
    total, available = _size_text(estimate.total), _size_text(estimate.available)
    console.print(f"memory     about {total} of {available} at the peak{excluded}", soft_wrap=True)
    if estimate.parameters:
        console.print(f"           {estimate.parameters:,} weights, {estimate.trained:,} of them trained")
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for part in estimate.parts:
        if part.size:
            table.add_row(f"           {part.name}", _size_text(part.size))
    console.print(table)


def _largest_parts(parts: Sequence[MemoryPart]) -> str:
    """Return the end of an error message: the largest parts, and the keys that make them smaller."""
    largest = sorted(parts, key=lambda part: -part.size)[:_MAX_PARTS]
    lines = "".join(f"\n  {part.name}: {_size_text(part.size)}; {part.fix}" for part in largest)
    return f"The largest parts, and what makes them smaller:{lines}"


def _size_text(size: int) -> str:
    if size < 2**30:
        return f"{size / 2**20:.1f} MiB"
    return f"{size / 2**30:,.2f} GiB" if size < 2**50 else "more than 1 PiB"


def check_machine(conf: Path, overrides: tuple[str, ...], backbone: str | None, text: str) -> None:
    """Print the memory on each GPU of a machine, for each phase in a training step. Nothing is started.

    Args:
        conf, overrides, backbone: as for a run.
        text: the machine, such as `8xH100-80G`.

    Raises:
        ConfigError: the text, or the configuration on such a machine, is invalid.
        ModelError: the model has no readable configuration.
        BackboneError: the memory does not suffice. The message names the keys that change it.
    """
    machine = Machine.parse(text)
    with described_gpus(machine.gpus):
        loaded = load_config(conf, overrides, backbone)
        config = resolve_names(loaded.config, loaded.path)
        if config.astuner.trainer_common.device == "cpu":
            device = "astuner.trainer_common.device is 'cpu'"
            raise ConfigError(f"{device}, but --machine describes GPUs; set it to auto or cuda")
        path = model_path(config.astuner.model.path, "model.path", (loaded.path.absolute().parent,))
        plan = _plan(config, loaded.origins, path, machine)
    console = make_console()
    console.print(f"backbone   {loaded.backbone}", soft_wrap=True)
    console.print(f"machine    {machine.gpus} × {machine.name}, {_size_text(machine.memory)} each", soft_wrap=True)
    console.print(f"model      {plan[0].parameters:,} weights, {plan[0].trained:,} of them trained", soft_wrap=True)
    for estimate in plan:
        console.print(f"\nmemory of {estimate.device}", soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for phase in estimate.phases:
            table.add_column(phase, justify="right")
        for name in dict.fromkeys(part.name for parts in estimate.phases.values() for part in parts):
            sizes = [sum(part.size for part in parts if part.name == name) for parts in estimate.phases.values()]
            table.add_row(name, *(_size_text(size) if size else "–" for size in sizes))
        totals = (sum(part.size for part in parts) for parts in estimate.phases.values())
        table.add_row("[bold]total[/]", *(f"[bold]{_size_text(total)}[/]" for total in totals))
        console.print(table)
        if estimate.host:
            console.print(f"offloaded to main memory: {_size_text(estimate.host)} of each machine", soft_wrap=True)
    if errors := [error for estimate in plan for error in _gpu_errors(estimate)]:
        raise BackboneError("\n".join(errors))


def _plan(config: RunConfig, origins: Mapping[KeyPath, str], path: str, machine: Machine) -> list[MemoryEstimate]:
    # PyTorch is imported after the configuration has been checked.
    match config.astuner.backbone:
        case "local":
            from astuner.backbone.local.memory import local_plan

            return local_plan(config.astuner, path, machine)
        case "verl":
            from astuner.backbone.verl.machine_plan import verl_plan

            return verl_plan(config, origins, path, machine)
        case "trinity":
            from astuner.backbone.trinity.machine_plan import trinity_plan

            return trinity_plan(config, origins, path, machine)
        case other:
            raise ConfigError(f"--machine is for --backbone=local, verl, trinity; {other} does not train")


def _gpu_errors(estimate: MemoryEstimate) -> Iterator[str]:
    yield from estimate.problems
    for phase, parts in estimate.phases.items():
        total = sum(part.size for part in parts)
        if total > estimate.available:
            yield (
                f"{phase} needs about {_size_text(total)} on {estimate.device}, which have "
                f"{_size_text(estimate.available)}. {_largest_parts(parts)}"
            )
