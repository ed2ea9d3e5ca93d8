"""The choice of a backbone for `astuner.backbone: auto`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from astuner.config.checks import unsupported_values
from astuner.config.gpus import MIN_GPUS_OF_TRINITY, visible_gpus
from astuner.config.keys import dotted, value_at
from astuner.config.root import AstunerConfig, RunConfig
from astuner.config.section import BackboneName
from astuner.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BackboneChoice:
    """The backbone of a run.

    Attributes:
        name: the configured backbone, or the backbone chosen for `auto`.
        reason: the reason for the choice; "" if the configuration names the backbone.
        alternative: how to train without the environment of trinity; "" if trinity was not chosen for `auto`.
    """

    name: BackboneName
    reason: str = ""
    alternative: str = ""

    def __str__(self) -> str:
        return f"{self.name} (auto: {self.reason})" if self.reason else self.name


def choose_backbone(config: RunConfig) -> BackboneChoice:
    """Return the backbone of a run; for `auto`, trinity if it has two or more GPUs and supports the run, else local."""
    run = config.astuner
    if run.backbone != "auto":
        return BackboneChoice(run.backbone)
    gpus, reason = _gpus_of_run(run)
    if gpus < MIN_GPUS_OF_TRINITY:
        return BackboneChoice("local", reason)
    on_local = {problem.keys for problem in unsupported_values(with_backbone(config, "local"))}
    for problem in unsupported_values(with_backbone(config, "trinity")):
        if problem.keys not in on_local:
            key = problem.keys[0]
            return BackboneChoice("local", f"trinity does not support {dotted(key)}: {value_at(config, key)}")
    asked = run.trainer_common.n_gpus_per_node is not None or run.trainer_common.nnodes > 1
    change = " astuner.trainer_common.n_gpus_per_node=1 astuner.trainer_common.nnodes=1" if asked else ""
    return BackboneChoice("trinity", reason, f"to train on one device without it, use --backbone=local{change}")


def with_backbone(config: RunConfig, backbone: BackboneName) -> RunConfig:
    """Return a copy of `config` with another backbone."""
    return config.model_copy(update={"astuner": config.astuner.model_copy(update={"backbone": backbone})})


def check_gpus(run: AstunerConfig, services: Collection[str] = ()) -> None:
    """Check that this machine has the GPUs that a trinity run asks for, unless the run joins a cluster.

    The backbones check everything else about GPUs. This check needs no package of Trinity's environment, so that nobody
    installs the environment for a run that is impossible.

    Args:
        run: the configuration, with the backbone chosen.
        services: names of the services that are started with the run.

    Raises:
        ConfigError: the machine has fewer GPUs.
    """
    asked, here = run.trainer_common.n_gpus_per_node or 1, visible_gpus()
    joins_cluster = run.trainer_common.ray_address is not None or "ray-cluster" in services
    if run.backbone != "trinity" or joins_cluster or asked <= max(here, 1):
        return
    use = f"write {here} or less" if here >= MIN_GPUS_OF_TRINITY else "use --backbone=local and remove the key"
    raise ConfigError(
        f"astuner.trainer_common.n_gpus_per_node (n_gpu of AstunerJob) is {asked}, and this machine has "
        f"{_counted(here)}; {use}, or set astuner.trainer_common.ray_address to join a Ray cluster that has them"
    )


def _gpus_of_run(run: AstunerConfig) -> tuple[int, str]:
    """Return the number of GPUs that a run requests or else finds, and the reason in a few words."""
    common = run.trainer_common
    if common.n_gpus_per_node is not None or common.nnodes > 1:
        per_node = common.n_gpus_per_node or max(visible_gpus(), 1)
        asked = per_node * common.nnodes
        return asked, f"n_gpus_per_node × nnodes asks for {_counted(asked)}"
    if common.device == "cpu":
        return 0, "trainer_common.device is cpu"
    here = visible_gpus()
    return here, f"this machine has {_counted(here)}"


def _counted(gpus: int) -> str:
    return "no GPU" if gpus == 0 else "1 GPU" if gpus == 1 else f"{gpus} GPUs"
