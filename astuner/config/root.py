"""The whole configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from astuner.config.asynchrony import AsynchronyConfig
from astuner.config.data import DataConfig, TaskJudgeConfig, TaskReaderConfig
from astuner.config.deadlines import DeadlinesConfig
from astuner.config.rollout import ContextTrackerConfig, DebugConfig, ModelConfig, RolloutConfig
from astuner.config.section import Section
from astuner.config.services import ServiceConfig, ServiceName
from astuner.config.trainer import TrainerCommonConfig, UpdateConfig

BackboneName = Literal["debug", "local", "trinity", "verl"]


def _folder_name(name: str) -> str:
    if not name.strip(". ") or set(name) & set("/\\\0"):
        raise ValueError("expected a name that a folder can have, without / and \\")
    return name


FolderName = Annotated[str, AfterValidator(_folder_name)]


class AstunerConfig(Section):
    """Section `astuner`: everything about a run."""

    project_name: str = "astuner_default_project"
    """Groups experiments in loggers."""
    experiment_name: FolderName = "read_yaml_name"
    """Name of the run and of its folder; read_yaml_name takes the YAML file's."""
    experiment_dir: str = "auto"
    """Folder of the run record; auto is {exp-dir}/{experiment_name}."""
    backbone: BackboneName = "local"
    """debug, local, trinity or verl; --backbone overrides it."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    data: DataConfig = DataConfig()
    """Lengths and batch size."""
    rollout: RolloutConfig = RolloutConfig()
    """How the agent runs against the model."""
    task_reader: TaskReaderConfig = TaskReaderConfig()
    """Where tasks come from."""
    task_judge: TaskJudgeConfig = TaskJudgeConfig()
    """How episodes are scored."""
    deadlines: DeadlinesConfig = DeadlinesConfig()
    """How long each phase may take before the log says where it stands."""
    services: dict[ServiceName, ServiceConfig] = Field(default_factory=dict)
    """Processes that the run needs, by name, each with a command; --with-NAME starts one."""
    debug: DebugConfig = DebugConfig()
    """The debug backbone's own settings."""
    trainer_common: TrainerCommonConfig = TrainerCommonConfig()
    """The training loop."""
    update: UpdateConfig = UpdateConfig()
    """How an update is computed."""
    asynchrony: AsynchronyConfig = AsynchronyConfig()
    """How far sampling may run ahead of training."""
    context_tracker: ContextTrackerConfig = ContextTrackerConfig()
    """Used only by the older step protocol."""
    execute_test: bool = False
    """Accepted for older files; does nothing."""
    execute_testing_lambda: str = ""
    """Accepted for older files; does nothing."""


class RunConfig(Section):
    """A whole file: `astuner`, and sections handed through to the backbone of that name."""

    astuner: AstunerConfig = AstunerConfig()
    """The run."""
    verl: dict[str, Any] = Field(default_factory=dict)
    """Passed through to verl."""
    trinity: dict[str, Any] = Field(default_factory=dict)
    """Passed through to Trinity."""


def starts_vllm(run: AstunerConfig) -> bool:
    """Whether the run starts a vLLM server of its own, or finds one that an earlier run has kept."""
    return run.backbone == "debug" and run.rollout.name == "vllm" and not run.debug.base_url
