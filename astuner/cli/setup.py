"""The commands that set up and check projects and machines: `init`, `install`, `doctor`, `check` and `completion`."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click
from click.shell_completion import get_completion_class

from astuner.cli.main import load_launcher
from astuner.cli.options import BACKBONE, CONF, DEBUGGER, EXP_DIR, OVERRIDES, SERVICES, SHOW, ServicesCommand
from astuner.launcher.starter import REQUIREMENTS, TEMPLATES

if TYPE_CHECKING:
    from astuner.viewer.transcripts import Shown

SHELLS = ("bash", "zsh", "fish")
_VARIABLE = "_ASTUNER_COMPLETE"


@click.command()
@click.argument("folder", default=".", type=click.Path(path_type=Path))
@click.option(
    "--template", type=click.Choice(TEMPLATES), default="chat", show_default=True, help="Kind of agent to start from."
)
def init(folder: Path, template: str) -> None:
    """Create a small project in FOLDER that runs without changes.

    It has an agent, a judge, tasks, a configuration and launch.json for VS Code. FOLDER is the working directory by
    default. Existing files are not overwritten.
    """
    from astuner.launcher.starter import start_project

    files = start_project(folder, template)
    for name in files.written:
        click.echo(f"wrote {folder / name}")
    for name in files.existing:
        click.echo(f"skipped {folder / name}, which already exists")
    module, extra = REQUIREMENTS.get(template, ("", ""))
    if module and importlib.util.find_spec(module) is None:
        click.echo(f'the template needs {module}: pip install "astuner[{extra}]"')
    if "agent.yaml" in files.written and {"agent.py", "judge.py"} & set(files.existing):
        click.echo("agent.yaml names the agent and judge of the starter project; change them to yours")
    elif files.written:
        enter = "" if folder.resolve() == Path.cwd() else f"cd {shlex.quote(str(folder))} && "
        click.echo(f"next: {enter}astuner --conf agent.yaml --backbone=debug")


@click.command()
@click.argument("backbone")
@click.option("--cpu", "device", flag_value="cpu", help="Install for the CPU. [default: without an NVIDIA GPU]")
@click.option("--cuda", "device", flag_value="cuda", help="Install for NVIDIA GPUs. [default: with an NVIDIA GPU]")
@click.option(
    "--vllm",
    is_flag=True,
    help="Include vLLM's CPU build, for rollout.name: vllm. Environments for GPUs always include vLLM.",
)
@click.option(
    "--python", metavar="PYTHON", help="Interpreter: a path, command or version. [default: the running interpreter]"
)
@click.option(
    "--with",
    "extra",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Also install this requirements file, such as your agent's, resolved with the backbone's pinned versions. Can "
    "be repeated.",
)
@click.option(
    "--path", type=click.Path(path_type=Path), metavar="DIR", help="Install to this folder instead of the default one."
)
@click.option("--index", default="", metavar="URL", help="Additional package index, such as PyTorch's.")
@click.option(
    "--pip", is_flag=True, expose_value=False, help="No effect, because pip is always used; accepted for older scripts."
)
@click.option("--fresh", is_flag=True, help="Reinstall from scratch, without the files of earlier --with options.")
def install(
    backbone: str,
    device: Literal["cpu", "cuda"] | None,
    vllm: bool,
    python: str | None,
    extra: tuple[Path, ...],
    path: Path | None,
    index: str,
    fresh: bool,
) -> None:
    """Install the environment for verl, trinity, appworld or verifiers, with tested package versions for backbones.

    An environment that is up to date is left unchanged; `astuner doctor` shows its state. Afterwards, `astuner --conf
    FILE --backbone=BACKBONE` runs there automatically. Tasks of AppWorld and verifiers also use their environments
    automatically.
    """
    from astuner.installer.env_specs import env_spec_for
    from astuner.installer.inspection import running_source
    from astuner.installer.install import InstallRequest
    from astuner.installer.install import install as install_request
    from astuner.installer.programs import PROGRAM_SPECS, install_program
    from astuner.system.gpus import installed_gpus

    if backbone in PROGRAM_SPECS:
        if device or vllm or extra or path:
            raise click.UsageError(
                f"{backbone} is not a backbone; only the options --python, --index and --fresh apply to it"
            )
        install_program(PROGRAM_SPECS[backbone], click.echo, python=python, index=index, fresh=fresh)
        return
    spec = env_spec_for(backbone, device or ("cuda" if installed_gpus() else "cpu"), vllm=vllm)
    if device is None:
        click.echo(f"detected device: {spec.device} (to choose, pass --cpu or --cuda)")
    if not spec.tested:
        click.echo(f"note: the package versions of {spec.name} are compatible as declared, but have not been tested")
    files = tuple(file.absolute() for file in extra) or None
    install_request(InstallRequest(spec, running_source(), python, files, path, index, fresh), click.echo)
    click.echo(f"next: astuner --conf FILE --backbone={backbone}")


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def doctor(as_json: bool) -> int:
    """Show the state of each backbone's environment, with problems and the commands that fix them.

    Exits with code 1 if an installed environment is broken.
    """
    from astuner.installer.doctor import examine, print_reports
    from astuner.launcher.console import make_console

    reports = examine()
    if as_json:
        click.echo(json.dumps({report.backbone: asdict(report) for report in reports}, indent=1))
    else:
        print_reports(make_console(stderr=False), reports)
    return int(any(report.state == "broken" for report in reports))


@click.command()
@click.argument("shell", required=False, type=click.Choice(SHELLS))
@click.option("--install", is_flag=True, help="Have the shell read the script when it starts, such as in ~/.bashrc.")
def completion(shell: str | None, install: bool) -> None:
    """Print the script of tab completion for commands, options, runs, backbones and configuration keys.

    SHELL is the shell of the environment variable SHELL by default. To use the script in this shell only:
    `source <(astuner completion)`.
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in SHELLS:
        raise click.UsageError(f"the shell {name!r} has no completion; name one of: {', '.join(SHELLS)}")
    from astuner.cli.main import astuner

    kind = get_completion_class(name)
    assert kind is not None  # click has the three shells
    # `_check_version` runs bash, which may be missing where the script is only printed.
    script = kind.source_template % kind(astuner, {}, "astuner", _VARIABLE).source_vars()
    if not install:
        click.echo(script)
        return
    for path in _install(name, script):
        click.echo(f"wrote {path}")
    click.echo("open a new shell to use it")


def _install(shell: str, script: str) -> list[Path]:
    """Write the script, and have the shell read it when it starts; return the changed files."""
    if shell == "fish":
        config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
        return [_written(config / "fish" / "completions" / "astuner.fish", script)]
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    changed = [_written(data / "astuner" / f"completion.{shell}", script)]
    startup = Path(os.environ.get("ZDOTDIR") or Path.home()) / ".zshrc" if shell == "zsh" else Path.home() / ".bashrc"
    quoted = shlex.quote(str(changed[0]))
    line = f"[ -f {quoted} ] && source {quoted}  # completion of astuner"
    if shell == "zsh":
        line = f"autoload -Uz compinit && compinit; {line}"
    text = startup.read_text() if startup.exists() else ""
    if line not in text.splitlines():
        separator = "" if not text or text.endswith("\n") else "\n"
        changed.append(_written(startup, f"{text}{separator}{line}\n"))
    return changed


def _written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@click.command(cls=ServicesCommand)
@CONF
@click.option("--dry-run", is_flag=True, help="Also roll out a few training episodes.")
@click.option(
    "--machine",
    metavar="NxTYPE-SIZEG",
    help="Instead, estimate the memory per GPU on such a machine, for example 8xH100-80G. Needs no GPU.",
)
@BACKBONE
@SHOW
@DEBUGGER
@SERVICES
@EXP_DIR
@OVERRIDES
def check(
    conf: Path,
    dry_run: bool,
    machine: str | None,
    backbone: str | None,
    show: Shown | None,
    services: tuple[str, ...],
    exp_dir: str,
    overrides: tuple[str, ...],
) -> None:
    """Check a configuration without training, and show the size of the run."""
    if show is not None and not dry_run:
        raise click.UsageError("--show requires --dry-run")
    if machine is not None:
        if dry_run or services:
            raise click.UsageError("--machine starts nothing; leave out --dry-run and the options of services")
        from astuner.launcher.check import check_machine

        check_machine(conf, overrides, backbone, machine)
        return
    launcher = load_launcher(conf, overrides, backbone, exp_dir, services)
    from astuner.launcher.check import check_run

    check_run(launcher, dry_run=dry_run, shown=show)
