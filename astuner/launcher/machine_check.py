"""`astuner check --machine`: a run's memory on each GPU of a machine that is not at hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from astuner.backbone.base import MemoryEstimate, MemoryPart
from astuner.backbone.training.model_folder import model_path
from astuner.config.backbone_choice import BackboneChoice
from astuner.config.gpus import described_gpus
from astuner.config.keys import KeyPath
from astuner.config.loading import load_config, resolve_names
from astuner.config.machine import Machine
from astuner.config.root import RunConfig
from astuner.errors import BackboneError, ConfigError
from astuner.launcher.check import format_size
from astuner.launcher.console import make_console

_MAX_PARTS = 4


def check_machine(conf: Path, overrides: tuple[str, ...], backbone: str | None, text: str) -> None:
    """Print the memory on each GPU of a machine, for each phase in a training step. Nothing is started.

    Args:
        conf, overrides, backbone: as of a run.
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
            raise ConfigError(f"{device}, and --machine describes GPUs; write auto or cuda")
        path = model_path(config.astuner.model.path, "model.path", (loaded.path.absolute().parent,))
        plan = _plan(config, loaded.origins, path, machine)
    _print_plan(make_console(), machine, loaded.backbone, plan)
    errors = [error for estimate in plan for error in _errors(estimate)]
    if errors:
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


def _print_plan(console: Console, machine: Machine, backbone: BackboneChoice, plan: Sequence[MemoryEstimate]) -> None:
    console.print(f"backbone   {backbone}", soft_wrap=True)
    console.print(f"machine    {machine.gpus} × {machine.name}, {format_size(machine.memory)} each", soft_wrap=True)
    console.print(f"model      {plan[0].parameters:,} weights, {plan[0].trained:,} of them trained", soft_wrap=True)
    for estimate in plan:
        console.print(f"\nmemory of {estimate.device}", soft_wrap=True)
        table = Table(box=None, pad_edge=False)
        table.add_column("")
        for phase in estimate.phases:
            table.add_column(phase, justify="right")
        names = dict.fromkeys(part.name for parts in estimate.phases.values() for part in parts)
        for name in names:
            table.add_row(name, *(_cell(parts, name) for parts in estimate.phases.values()))
        totals = (sum(part.size for part in parts) for parts in estimate.phases.values())
        table.add_row("[bold]total[/]", *(f"[bold]{format_size(total)}[/]" for total in totals))
        console.print(table)
        if estimate.host:
            console.print(f"offloaded to main memory: {format_size(estimate.host)} of each machine", soft_wrap=True)


def _cell(parts: Sequence[MemoryPart], name: str) -> str:
    size = sum(part.size for part in parts if part.name == name)
    return format_size(size) if size else "–"


def _errors(estimate: MemoryEstimate) -> list[str]:
    """Return what does not fit on a GPU, with the keys that make it smaller."""
    errors = list(estimate.problems)
    for phase, parts in estimate.phases.items():
        total = sum(part.size for part in parts)
        if total > estimate.available:
            largest = sorted(parts, key=lambda part: -part.size)[:_MAX_PARTS]
            lines = "".join(f"\n  {part.name}: {format_size(part.size)}; {part.fix}" for part in largest)
            errors.append(
                f"{phase} needs about {format_size(total)} on {estimate.device}, which have "
                f"{format_size(estimate.available)}. The largest parts, and what makes them smaller:{lines}"
            )
    return errors
