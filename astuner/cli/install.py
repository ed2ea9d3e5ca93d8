"""The commands `astuner install` and `astuner doctor`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Literal

import click


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
    """Install the environment of a backbone (verl, trinity) with tested package versions, or of appworld or verifiers.

    An environment that is up to date is left unchanged; `astuner doctor` shows its state. Afterwards, `astuner --conf
    FILE --backbone=BACKBONE` runs there automatically. Tasks of AppWorld and verifiers also use their environments
    automatically.
    """
    from astuner.config.gpus import installed_gpus
    from astuner.installer.env_specs import env_spec_for
    from astuner.installer.install import InstallRequest
    from astuner.installer.install import install as install_request
    from astuner.installer.programs import PROGRAM_SPECS, install_program
    from astuner.installer.source import running_source

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
