"""AstunerJob: a run set up and started from Python."""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from astuner.config.changing import with_values
from astuner.config.dumping import to_yaml
from astuner.config.loading import check_config, load_config, resolve_names
from astuner.config.root import RunConfig
from astuner.errors import ConfigError
from astuner.plugin import load_class
from astuner.run_record import RunSummary
from astuner.task_judge.judge_base import BaseJudge
from astuner.workflow import Workflow

_READERS = {"hf": "huggingface_dat_repo", "file": "dataset_file", "jsonl": "dataset_file"}


@dataclass(frozen=True)
class TunedModel:
    """What a run left.

    Attributes:
        path: the tuned model, a folder in transformers' format.
        metrics: the run's summary, as in summary.json.
        record: the run's folder.
    """

    path: Path
    metrics: RunSummary
    record: Path

    def load(self) -> tuple[Any, Any]:
        """Return the model (`AutoModelForCausalLM`) and its tokenizer."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        return AutoModelForCausalLM.from_pretrained(self.path), AutoTokenizer.from_pretrained(self.path)


class AstunerJob:
    """One run: choose workflow, data and judge, then `tune()`.

    Two jobs are equal when their configurations are.
    """

    def __init__(
        self,
        n_gpu: int | None = None,
        algorithm: str = "grpo",
        model: str | Path = "",
        *,
        backbone: str = "local",
        project_name: str = "astuner",
        experiment_name: str = "job",
        **settings: Any,
    ) -> None:
        """Set up a job.

        Args:
            n_gpu: GPUs per machine, for the backbones that use a cluster.
            algorithm: `trainer_common.algorithm.adv_estimator`.
            model: a local folder or a Hugging Face name.
            backbone: debug, local, trinity or verl.
            project_name, experiment_name: name the run and its record.
            settings: any other key, its dots written as double underscores: `trainer_common__optim__lr=1e-5`.

        Raises:
            ConfigError: a key or value is wrong.
        """
        self._config = RunConfig()
        # As if it had been loaded from a file of this name in the working directory.
        self._path = Path("job.yaml")
        self._notices: tuple[str, ...] = ()
        given: dict[str, Any] = {
            "backbone": backbone,
            "project_name": project_name,
            "experiment_name": experiment_name,
            "model.path": str(model),
            "trainer_common.algorithm.adv_estimator": algorithm,
        }
        if n_gpu is not None:
            given["trainer_common.n_gpus_per_node"] = n_gpu
        self.configure(given | {key.replace("__", "."): value for key, value in settings.items()})

    @property
    def config(self) -> RunConfig:
        """The configuration as it stands."""
        return self._config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AstunerJob) and self._config == other._config

    __hash__ = None  # type: ignore[assignment]

    def configure(self, values: dict[str, Any]) -> Self:
        """Set keys of section `astuner` by their dotted names.

        Raises:
            ConfigError: a key is unknown or a value is not allowed.
        """
        self._config = with_values(self._config, {f"astuner.{key}": value for key, value in values.items()})
        return self

    def set_workflow(self, workflow: type[Workflow] | str) -> Self:
        """Choose the agent: a Workflow class, or its `package.module->Class`."""
        return self.configure({"rollout.agentscope_workflow": _class_path(workflow, Workflow)})

    def set_judge(self, judge: type[BaseJudge] | str) -> Self:
        """Choose the judge: a BaseJudge class, or its `package.module->Class`; not needed if the workflow scores."""
        return self.configure({"task_judge.judge_protocol": _class_path(judge, BaseJudge)})

    def set_data(
        self,
        type: str,
        dataset_path: str | Path,
        *,
        validation_path: str | Path | None = None,
        training_split: str = "train",
        validation_split: str | None = None,
    ) -> Self:
        """Choose the tasks.

        Args:
            type: `hf` (or huggingface_dat_repo) for a Hugging Face name or folder, `file` (or dataset_file, jsonl)
                for a local file.
            dataset_path: the name, folder or training file.
            validation_path: the validation file, for local files.
            training_split, validation_split: names of splits, for Hugging Face.

        Raises:
            ConfigError: an unknown type.
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
            known = ", ".join(sorted({*_READERS, *_READERS.values()}))
            raise ConfigError(f"set_data(type={type!r}): use one of {known}")
        return self.configure(values)

    def dump_job_as_yaml(self, path: str | Path) -> Path:
        """Write the job as a YAML file that `astuner --conf` and `load_job_from_yaml` take."""
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(to_yaml(self._config))
        return target

    def load_job_from_yaml(self, path: str | Path) -> Self:
        """Take the configuration of a YAML file in place of this job's."""
        loaded = load_config(Path(path))
        self._config, self._path, self._notices = loaded.config, loaded.path, loaded.notices
        return self

    def tune(self, exp_dir: str | Path = "launcher_record", services: Sequence[str] = ()) -> TunedModel:
        """Run the job; the same as `astuner --conf` with its YAML.

        Args:
            exp_dir: where run records go.
            services: what is started before and stopped after, as by `--with-NAME`.

        Raises:
            InstallError: the backbone has an environment of its own, and this is another.
            AstunerError: whatever else is wrong with it.
        """
        from astuner.launcher.environments.entering import require_environment

        require_environment(self._config.astuner.backbone)
        from astuner.launcher.launch import Launch
        from astuner.launcher.services import Services

        notices = dict.fromkeys((*self._notices, *check_config(self._config)))
        config = resolve_names(self._config, self._path, exp_dir)
        config_dir = self._path.absolute().parent
        wanted = Services.named(services, config, config_dir, Path(exp_dir))
        summary = Launch(config, config_dir, time.time(), tuple(notices), wanted).train()
        assert summary.model is not None
        return TunedModel(Path(summary.model), summary, Path(config.astuner.experiment_dir))


def _class_path(given: type | str, base: type) -> str:
    """Return `package.module->Class` for a class; one of the running script is named by the script's file."""
    if isinstance(given, str):
        return given
    if not (inspect.isclass(given) and issubclass(given, base)):
        raise ConfigError(f"a subclass of {base.__name__} is expected, got {given!r}")
    if "<locals>" in given.__qualname__:
        raise ConfigError(f"{given.__qualname__} is defined inside a function, where no YAML can name it; move it out")
    if given.__module__ == "__main__":
        script = getattr(sys.modules["__main__"], "__file__", None)
        if script is None:
            raise ConfigError(f"{given.__name__} was typed in an interactive session; put it into a file")
        return f"{Path(script).absolute()}->{given.__qualname__}"
    path = f"{given.__module__}->{given.__qualname__}"
    try:
        load_class(path, base, search=(Path.cwd(),))
    except Exception:
        return f"{Path(inspect.getfile(given)).absolute()}->{given.__qualname__}"
    return path
