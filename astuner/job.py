"""AstunerJob: configure and run astuner from Python."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from loguru import logger

from astuner.config.loading import check_config, check_gpus, choose_backbone, load_config, resolve_names, with_values
from astuner.config.root import RunConfig
from astuner.config.yaml_file import secret_keys, to_yaml
from astuner.errors import AstunerError, ConfigError, PluginError, short_repr
from astuner.plugin import load_object
from astuner.run_record.summary import RunSummary
from astuner.system.clock import timestamp
from astuner.task_judge.judge_base import BaseJudge
from astuner.workflow import Workflow, workflow_factory

_READERS = {"hf": "huggingface_dat_repo", "file": "dataset_file", "jsonl": "dataset_file"}


@dataclass(frozen=True)
class TunedModel:
    """The result of a training run.

    Attributes:
        path: folder of the trained model, in the transformers format.
        metrics: summary of the run, as in summary.json.
        record: folder of the run record.
    """

    path: Path
    metrics: RunSummary
    record: Path

    def load(self) -> tuple[Any, Any]:
        """Return the model (`AutoModelForCausalLM`) and its tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(self.path), AutoTokenizer.from_pretrained(self.path)


class AstunerJob:
    """A training run: set the workflow, the data and the judge, then call `tune()`.

    Two jobs are equal if their configurations are equal.
    """

    def __init__(
        self,
        n_gpu: int | None = None,
        algorithm: str = "grpo",
        model: str | Path = "",
        *,
        backbone: str = "auto",
        project_name: str = "astuner",
        experiment_name: str = "read_yaml_name",
        **settings: Any,
    ) -> None:
        """Create a job.

        Args:
            n_gpu: GPUs per machine; with two or more, `auto` is trinity.
            algorithm: value of `trainer_common.algorithm.adv_estimator`.
            model: local folder or Hugging Face name.
            backbone: auto, debug, local, trinity or verl; auto is trinity with two or more GPUs, and local otherwise.
            project_name: name of the project.
            experiment_name: name of the run and its record; read_yaml_name is the name of the YAML file that the
                job was dumped to or loaded from, or else the workflow's: MathAgent gives math_agent.
            settings: other keys, with dots written as double underscores: `trainer_common__optim__lr=1e-5`.

        Raises:
            ConfigError: a key is unknown or a value is invalid.
        """
        self._config = RunConfig()
        self._file: Path | None = None
        self._notices: tuple[str, ...] = ()
        values: dict[str, Any] = {
            "backbone": backbone,
            "project_name": project_name,
            "experiment_name": experiment_name,
            "model.path": str(model),
            "trainer_common.algorithm.adv_estimator": algorithm,
        }
        if n_gpu is not None:
            values["trainer_common.n_gpus_per_node"] = n_gpu
        self.configure(values | {key.replace("__", "."): value for key, value in settings.items()})

    @property
    def config(self) -> RunConfig:
        """The current configuration."""
        return self._config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AstunerJob) and self._config == other._config

    __hash__ = None  # type: ignore[assignment]

    def configure(self, values: dict[str, Any]) -> Self:
        """Set keys of section `astuner`, by their dotted names.

        Raises:
            ConfigError: a key is unknown or a value is invalid.
        """
        self._config = with_values(self._config, {f"astuner.{key}": value for key, value in values.items()})
        return self

    def set_workflow(self, workflow: type[Workflow] | Callable[..., Awaitable[Any]] | str) -> Self:
        """Set the agent: a Workflow class, a function `async def run(task, model_tuner)`, or `package.module->Name`.

        Raises:
            ConfigError: it is something else, or the YAML cannot name it.
        """
        if not isinstance(workflow, str) and not inspect.isclass(workflow):
            try:
                workflow_factory(_shown_name(workflow), workflow)
            except PluginError as error:
                raise ConfigError(f"set_workflow: {error}") from error
        return self.configure({"rollout.agentscope_workflow": _path_of(workflow, Workflow)})

    def set_judge(self, judge: type[BaseJudge] | str) -> Self:
        """Set the judge: a BaseJudge class or its `package.module->Class`. Optional if workflows return rewards."""
        return self.configure({"task_judge.judge_protocol": _path_of(judge, BaseJudge)})

    def set_data(
        self,
        type: str,
        dataset_path: str | Path,
        *,
        validation_path: str | Path | None = None,
        training_split: str = "train",
        validation_split: str | None = None,
    ) -> Self:
        """Set the tasks.

        Args:
            type: `hf` (or huggingface_dat_repo) for a Hugging Face data set or folder, `file` (or dataset_file, jsonl)
                for local files.
            dataset_path: name or folder of the data set, or the training file.
            validation_path: the validation file, for local files.
            training_split: name of the training split, for Hugging Face.
            validation_split: name of the validation split, for Hugging Face.

        Raises:
            ConfigError: the type is unknown.
        """
        reader = _READERS.get(type, type)
        values: dict[str, Any] = {"task_reader.type": reader}
        if reader == "huggingface_dat_repo":
            values |= {
                f"task_reader.{reader}.dataset_path": str(dataset_path),
                f"task_reader.{reader}.training_split": training_split,
                f"task_reader.{reader}.validation_split": validation_split,
            }
        elif reader == "dataset_file":
            values |= {
                f"task_reader.{reader}.training.file_path": str(dataset_path),
                f"task_reader.{reader}.validation.file_path": str(validation_path or ""),
            }
        else:
            types = ", ".join(sorted({*_READERS, *_READERS.values()}))
            raise ConfigError(f"set_data(type={type!r}): use one of {types}")
        return self.configure(values)

    def dump_job_as_yaml(self, path: str | Path, *, full: bool = False) -> Path:
        """Write the configuration as a YAML file for `astuner --conf` and `load_job_from_yaml`.

        `tune` then does what `astuner --conf` does with that file. Secrets, such as API keys, are written as
        `[redacted]`, with a warning that names their keys. With `full`, keys at their defaults are written, too.
        """
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(to_yaml(self._config, redacted=True, full=full))
        if names := secret_keys(self._config):
            logger.warning(
                "{} has [redacted] in place of the secrets in {}; keep secrets in environment variables, or give them "
                "on the command line",
                target,
                ", ".join(names),
            )
        self._file = target
        return target

    @property
    def _path(self) -> Path:
        """The YAML file of the job; if there is none, one in the working directory that is named after the workflow."""
        if self._file is not None:
            return self._file
        name = (self._config.astuner.rollout.agentscope_workflow or "").rpartition("->")[2]
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
        return Path(f"{words or 'job'}.yaml")

    def load_job_from_yaml(self, path: str | Path) -> Self:
        """Replace the configuration by a YAML file's."""
        loaded = load_config(Path(path))
        self._config, self._file, self._notices = loaded.config, loaded.path, loaded.notices
        return self

    def tune(self, exp_dir: str | Path = "launcher_record", services: Sequence[str] = ()) -> TunedModel:
        """Train the model, as `astuner --conf` does with the job's YAML.

        Args:
            exp_dir: folder of the run records.
            services: names of the services to start before the run and stop after it, as `--with-NAME` does.

        Raises:
            ConfigError: the machine has fewer GPUs than `n_gpu`.
            InstallError: the backbone needs another environment.
            AstunerError: any other error of the configuration or the run.
        """
        from astuner.installer.reexec import require_environment

        choice = choose_backbone(self._config)
        config = resolve_names(self._config, self._path, exp_dir)
        check_gpus(config.astuner, services)
        require_environment(choice)
        from astuner.launcher.launch import Launcher
        from astuner.launcher.services import Services

        notices = dict.fromkeys((*self._notices, *check_config(self._config)))
        config_dir = self._path.absolute().parent
        created = Services.from_names(services, config, config_dir, Path(exp_dir))
        summary = Launcher(
            config, config_dir, timestamp(), tuple(notices), created, backbone_reason=choice.reason
        ).train()
        assert summary.model is not None
        return TunedModel(Path(summary.model), summary, Path(config.astuner.experiment_dir))


def _path_of(value: object, base: type) -> str:
    """Return `package.module->Name`; for a name of the running script, with the script's file as the module.

    The value is such a path, a subclass of `base`, or, for workflows, a function.

    Raises:
        ConfigError: the class does not derive from `base`, or the YAML cannot name the value.
    """
    if isinstance(value, str):
        return value
    if (inspect.isclass(value) or base is not Workflow) and not (inspect.isclass(value) and issubclass(value, base)):
        raise ConfigError(f"expected a subclass of {base.__name__}, got {value!r}")
    name = _shown_name(value)
    module = str(getattr(value, "__module__", None))
    if "<locals>" in name:
        raise ConfigError(f"{name} is defined inside a function, so the YAML cannot name it; move it to module level")
    script = getattr(sys.modules["__main__"], "__file__", None)
    if module == "__main__" and script is None:
        raise ConfigError(f"{name} is defined in an interactive session, so the YAML cannot name it; move it to a file")
    if getattr(sys.modules.get(module), name, None) is not value:
        raise ConfigError(
            f"{name} is not a name of module {module}, so the YAML cannot name it; move it to module level"
        )
    if module == "__main__":
        return f"{Path(str(script)).absolute()}->{name}"
    path = f"{module}->{name}"
    try:
        if load_object(path, search=(Path.cwd(),)) is value:
            return path
    except AstunerError:
        pass
    return f"{Path(inspect.getfile(sys.modules[module])).absolute()}->{name}"


def _shown_name(value: object) -> str:
    return str(getattr(value, "__qualname__", None) or short_repr(value))
