"""The whole configuration."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from astuner.config.algorithms import ALGORITHMS
from astuner.config.data import DataConfig, TaskJudgeConfig, TaskReaderConfig
from astuner.config.model import ModelConfig
from astuner.config.rollout import DebugConfig, RolloutConfig
from astuner.config.section import (
    FOR_SFT,
    TRAINING,
    WITH_FRAMEWORK,
    BackboneName,
    Section,
    from_run,
    key,
    mirrors,
    when,
)
from astuner.config.services import GatewayConfig, ServiceConfig, ServiceName
from astuner.config.timing import AsynchronyConfig, DeadlinesConfig
from astuner.config.trainer import TrainerCommonConfig, UpdateConfig
from astuner.config.workflow import ContextTrackerConfig, WorkflowConfig


def _folder_name(name: str) -> str:
    if not name.strip(". ") or set(name) & set("/\\\0"):
        raise ValueError("expected a valid folder name, without / and \\")
    return name


FolderName = Annotated[str, AfterValidator(_folder_name)]
WITHOUT_EFFECT = ("astuner.execute_test", "astuner.execute_testing_lambda")
"""Keys that are accepted and have no effect."""


class AstunerConfig(Section):
    """Section `astuner`: everything about a run."""

    project_name: str = key(
        "astuner_default_project",
        verl=mirrors("trainer.project_name"),
        trinity="part of the run record and loggers",
        resume="any",
    )
    """Groups experiments in loggers."""
    experiment_name: FolderName = key(
        "read_yaml_name",
        verl=mirrors("trainer.experiment_name"),
        trinity="part of the run record and loggers",
        resume="any",
    )
    """Name of the run and its folder; read_yaml_name takes the YAML file's."""
    experiment_dir: str = key(
        "auto",
        verl=from_run("trainer.default_local_dir", rule="checkpoint_folder"),
        trinity=from_run("checkpoint_root_dir", rule="checkpoint_root_dir"),
        resume="any",
    )
    """Folder of the run record; auto is {exp-dir}/{experiment_name}."""
    backbone: Literal["auto"] | BackboneName = key("auto", trainers="selects this backbone", resume="same")
    """debug, local, trinity, verl, or auto: trinity with two or more GPUs, else local. --backbone overrides it."""
    model: ModelConfig = ModelConfig()
    """The model to train."""
    data: DataConfig = key(DataConfig(), resume="same")
    """Lengths and batch size."""
    rollout: RolloutConfig = key(RolloutConfig(), no_effect=(FOR_SFT,), resume="same")
    """How the agent runs with the model."""
    workflow: WorkflowConfig = key(
        WorkflowConfig(),
        no_effect=(FOR_SFT, when("workflow.command", None)),
        trainers="runs in astuner's episode workers",
        resume="same",
    )
    """A program that is the agent, instead of rollout.agentscope_workflow."""
    task_reader: TaskReaderConfig = key(TaskReaderConfig(), trainers="astuner reads the tasks", resume="same")
    """The source of the tasks."""
    task_judge: TaskJudgeConfig = key(
        TaskJudgeConfig(),
        no_effect=(FOR_SFT,),
        trainers="scores the episodes in the process that runs them",
        resume="same",
    )
    """How episodes are scored."""
    deadlines: DeadlinesConfig = key(
        DeadlinesConfig(),
        verl="astuner reports a phase that takes too long",
        trinity="astuner reports a phase that takes too long; load_model, validation, sync_weights and "
        "save_checkpoint end the run if Trinity takes longer",
        resume="any",
    )
    """How long each phase may take before the log reports it."""
    gateway: GatewayConfig = key(
        GatewayConfig(),
        no_effect=(FOR_SFT,),
        trainers="runs in the processes that run the episodes",
        resume="any",
    )
    """The HTTP server through which programs call the model."""
    services: dict[ServiceName, ServiceConfig] = key({}, trainers="the launcher starts and stops them", resume="any")
    """Processes that the run needs, by name, each with a command; --with-NAME starts one."""
    debug: DebugConfig = key(DebugConfig(), used_by=("debug",), resume="any")
    """Settings of the debug backbone."""
    trainer_common: TrainerCommonConfig = key(TrainerCommonConfig(), used_by=TRAINING, resume="same")
    """The training loop."""
    update: UpdateConfig = key(UpdateConfig(), resume="same")
    """How an update is computed."""
    asynchrony: AsynchronyConfig = key(
        AsynchronyConfig(),
        used_by=("trinity",),
        verl="all episodes of a step are sampled with the previous step's weights",
        resume="same",
    )
    """How far sampling may run ahead of training."""
    context_tracker: ContextTrackerConfig = key(
        ContextTrackerConfig(),
        no_effect=(FOR_SFT, WITH_FRAMEWORK),
        trainers="applies to the agent loop in astuner's episode workers",
        resume="same",
    )
    """The history of the built-in agent loop."""
    execute_test: bool = key(False, trainers="no effect", resume="any")
    """Accepted for older files; has no effect."""
    execute_testing_lambda: str = key("", trainers="no effect", resume="any")
    """Accepted for older files; has no effect."""

    @property
    def is_supervised(self) -> bool:
        """Whether the run trains on transcripts, without episodes."""
        return ALGORITHMS[self.trainer_common.algorithm.adv_estimator].reinforcement is None


class RunConfig(Section):
    """A whole file: `astuner`, and the sections that are passed to the backbone of that name."""

    astuner: AstunerConfig = AstunerConfig()
    """The run."""
    verl: dict[str, Any] = key({}, used_by=("verl",), verl="passed to verl; each key is checked", resume="same")
    """Passed to verl."""
    trinity: dict[str, Any] = key(
        {}, used_by=("trinity",), trinity="passed to Trinity; each key is checked", resume="same"
    )
    """Passed to Trinity."""
