"""The user's inputs of a run, loaded and checked: tasks, model folder and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loguru import logger

from astuner.backbone.training.episode_placement import check_agent_named
from astuner.config.algorithm_settings import TEACHER_KEY, teacher_folder
from astuner.config.data import MixturePart, TaskReaderConfig, part_names
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig
from astuner.doors import through_door
from astuner.env_service.addresses import EnvServiceAddress, service_address
from astuner.errors import AstunerError, ConfigError, ModelError, did_you_mean
from astuner.llm_engine.context_length import check_context_length, shortened_context
from astuner.model_tuner.chat_options import SAMPLING_PARAMETERS, CallSettings
from astuner.model_tuner.codec import ChatCodec, load_tokenizer
from astuner.plugin import load_function, raised_at, reject_missing
from astuner.run_record.findings import RunFinding
from astuner.schema import TaskSet
from astuner.system.redaction.output import redacted_output
from astuner.task_judge.judge_base import judge_paths
from astuner.task_reader import read_tasks
from astuner.task_reader.dataset_file import check_files
from astuner.task_rollout.rollout import EpisodeExecutor

if TYPE_CHECKING:
    from astuner.diagnostics.monitor import Monitor
    from astuner.task_judge.rubrics_auto_grader.grader import Rubrics

_RECORDS = "launcher_record"


@dataclass(frozen=True)
class RunInputs:
    """The user's inputs of a run.

    Attributes:
        model_path: a local folder or a Hugging Face name.
        search: absolute folders that are searched for the user's code and for relative paths.
        env_services: the environment services by their addresses as configured.
        teacher_path: the folder or Hugging Face name of the teacher's model; None without one.
        episodes: runs the episodes, in worker processes or in this one; None in supervised training, and if Ray's
            processes do.
    """

    tasks: TaskSet
    model_path: str
    tokenizer: Any
    codec: ChatCodec
    search: tuple[Path, ...] = ()
    env_services: Mapping[str, EnvServiceAddress] = field(default_factory=dict)
    rubrics: Rubrics | None = None
    teacher_path: str | None = None
    episodes: EpisodeExecutor | None = None

    def monitor(self, config: AstunerConfig, record: Callable[[RunFinding], None], *, trains: bool) -> Monitor:
        """Return the monitor of a run that trains, or tries out a training; `record` gets its findings."""
        monitor: Monitor = through_door("diagnostics", "monitor").of(
            config, self.tasks, self.codec, self.model_path, record, trains=trains
        )
        return monitor


def load_run_inputs(
    config: AstunerConfig,
    config_dir: Path,
    model: str | None = None,
    env_service: EnvServiceAddress | None = None,
) -> RunInputs:
    """Load the user's inputs. Cheap checks run before slow steps.

    Args:
        env_service: the environment service that the run has started.

    Raises:
        AstunerError: an input cannot be loaded.
    """
    search = (Path.cwd(), config_dir.absolute())
    check_agent_named(config)
    supervised = config.is_supervised
    reader = with_task_files(config.task_reader, transcripts=supervised, base_dir=config_dir, search=search)
    tasks = read_tasks(reader, base_dir=config_dir, search=search, transcripts=supervised, env_service=env_service)
    urls = {task.env.url for task in (*tasks.training, *tasks.validation) if task.env is not None}
    path = model_path(model, "--model", search) if model else model_path(config.model.path, "model.path", search)
    teacher = teacher_folder(config.trainer_common.distillation)
    teacher_path = None if teacher is None or supervised else model_path(teacher, TEACHER_KEY, search)
    check_context_length(path, config.rollout.max_model_len)
    tokenizer = load_tokenizer(path)
    codec = ChatCodec(tokenizer, config.model.renderer)
    if config.task_reader.filters:
        tasks = through_door("tasks", "filters")(
            tasks,
            config.task_reader.filters,
            count_tokens=lambda text: len(tokenizer.encode(text, add_special_tokens=False)),
            search=search,
        )
    env_services = {url: service_address(url, env_service) for url in sorted(urls)}
    rubrics = None
    if config.task_judge.learns_rubrics and not supervised:
        rubrics = load_rubrics(config, config_dir, search, env_service)
    return RunInputs(tasks, path, tokenizer, codec, search, env_services, rubrics, teacher_path)


def check_references(
    config: AstunerConfig, config_dir: Path, origins: Mapping[KeyPath, str], model: str | None = None
) -> None:
    """Check that tasks are named, and that the user's classes, files and model exist.

    PyTorch and user code are not imported.

    Raises:
        ConfigError: no tasks are named.
        PluginError, TaskDataError, ModelError: one does not exist.
    """
    # Only defaults, which fit few workflows, name the tasks.
    if config.task_reader == TaskReaderConfig() and not any(path[:2] == ("astuner", "task_reader") for path in origins):
        raise ConfigError(
            "the configuration names no tasks; add the section task_reader under `astuner:`, for example\n"
            "  task_reader: {type: dataset_file, dataset_file: {training: {file_path: tasks.jsonl}}}\n"
            "or, for a workflow that makes a task from a seed,\n"
            "  task_reader: {type: seeds, count: 64}"
        )
    search = (Path.cwd(), config_dir.absolute())
    reader = config.task_reader
    paths = [path for path in (reader.type, *(part.type for part in reader.mixture)) if "->" in path]
    paths += [entry.function for entry in reader.filters if entry.type == "function"]
    sources = (reader.feedback_tracing, *(part.feedback_tracing for part in reader.mixture))
    paths += [source.redact for source in sources if source.redact]
    if not config.is_supervised:
        paths += filter(None, (config.rollout.agentscope_workflow,))
        paths += () if config.task_judge.learns_rubrics else judge_paths(config.task_judge)
        paths += [player for player in config.rollout.players.values() if player != "random"]
    models = [("--model" if model else "model.path", model or config.model.path)]
    if (teacher := teacher_folder(config.trainer_common.distillation)) is not None:
        models.append((TEACHER_KEY, teacher))
    paths += [path for _, path in models if "->" in path]
    with redacted_output():
        for path in paths:
            reject_missing(path, search=search)
        for part in reader.mixture or (reader,):
            if part.type == "dataset_file":
                check_files(part.dataset_file, config_dir)
        for setting, path in models:
            if "->" not in path:
                local_model(path, setting, search)


def with_task_files(
    reader: TaskReaderConfig, *, transcripts: bool, base_dir: Path, search: Sequence[Path]
) -> TaskReaderConfig:
    """Write the files for readers that make their own tasks, and return the section with readers for these files.

    Args:
        transcripts: write transcripts for supervised training instead of tasks.
        base_dir: the folder of the YAML file, for relative paths that do not exist in the working directory.

    Raises:
        AstunerError: the tasks cannot be made.
    """

    def written(part: TaskReaderConfig | MixturePart) -> dict[str, object]:
        if part.type == "feedback_tracing":
            write = through_door("tasks", "feedback_tracing")
            files = write(part.feedback_tracing, transcripts=transcripts, base_dir=base_dir, search=search)
        elif part.type == "data_generation":
            if transcripts:
                raise ConfigError(
                    "algorithm sft trains on transcripts, and task_reader.type data_generation generates tasks; set "
                    "task_reader.type to dataset_file or feedback_tracing"
                )
            files = through_door("tasks", "data_generation")(part.data_generation, base_dir=base_dir, search=search)
        else:
            return {}
        return {"type": "dataset_file", "dataset_file": files}

    if reader.type != "mixture":
        return reader.model_copy(update=written(reader))
    named = zip(part_names(reader.mixture), reader.mixture, strict=True)
    parts = [part.model_copy(update={"name": name, **written(part)}) for name, part in named]
    return reader.model_copy(update={"mixture": parts})


def load_rubrics(
    config: AstunerConfig, config_dir: Path, search: Sequence[Path], env_service: EnvServiceAddress | None
) -> Rubrics:
    """Load or learn the rubrics of the judge; raise AstunerError if that is impossible."""
    settings = config.task_judge.rubrics_auto_grader
    reader = TaskReaderConfig(
        type=settings.input_data_type,
        dataset_file=settings.dataset_file,
        huggingface_dat_repo=settings.huggingface_dat_repo,
        env_service=settings.env_service,
    )
    section = "astuner.task_judge.rubrics_auto_grader"
    samples = read_tasks(reader, base_dir=config_dir, search=search, env_service=env_service, section=section)
    rubrics: Rubrics = through_door("judge", "learned_rubrics")(config.task_judge, samples)
    return rubrics


# verl and trinity divide all logits of a batch by one temperature. Their vLLM servers return logprobs after
# penalties and, if the run has neither top_p nor top_k, after those of a request.
_FIXED_SAMPLING = {"verl": SAMPLING_PARAMETERS, "trinity": SAMPLING_PARAMETERS}


def call_settings(config: AstunerConfig, *, validation: bool) -> CallSettings:
    """Return the LLM call settings for a training or validation episode."""
    rollout, val = config.rollout, config.rollout.val_kwargs
    temperature, top_p, top_k = rollout.temperature, rollout.top_p, rollout.top_k
    if validation:
        temperature, top_p, top_k = (val.temperature if val.do_sample else 0.0), val.top_p, val.top_k
    return CallSettings(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=rollout.max_response_length_in_one_turn,
        max_model_len=rollout.max_model_len,
        max_prompt_length=config.data.max_prompt_length,
        max_response_length=config.data.max_response_length,
        max_calls=rollout.multi_turn.max_steps,
        disable_tools=rollout.agentscope_disable_toolcalls,
        madness_checklist=tuple(rollout.compute_madness_checklist),
        madness_ends_episode=rollout.agent_madness_termination,
        client_sampling=rollout.client_sampling,
        fixed_sampling=() if validation else _FIXED_SAMPLING.get(config.backbone, ()),
        seeds_by_prompt=config.trainer_common.deterministic,
    )


def context_notice(config: AstunerConfig, run_inputs: RunInputs) -> str | None:
    """Return that the sequences of a run are limited by the model; a model server has its own limit."""
    if config.backbone == "debug" and config.debug.base_url:
        return None
    return shortened_context(run_inputs.model_path, config.rollout.max_model_len)


def greedy_validation_notice(config: AstunerConfig) -> str | None:
    """Return what to change for pass@k, if several validation episodes per task are configured but one is run."""
    configured = max(config.rollout.val_kwargs.num_repeat, config.trainer_common.val_pass_n)
    if validation_repeats(config) == configured:
        return None
    key = "val_pass_n" if config.trainer_common.val_pass_n == configured else "rollout.val_kwargs.num_repeat"
    return (
        f"validation is greedy, so one episode per task is run instead of {configured} equal ones ({key}); for "
        f"pass@{configured}, set rollout.val_kwargs.do_sample: True and rollout.val_kwargs.temperature above 0"
    )


def validation_repeats(config: AstunerConfig) -> int:
    """Return the number of validation episodes per task: one if sampling is greedy, because all would be the same."""
    if not config.rollout.val_kwargs.samples:
        return 1
    return max(config.rollout.val_kwargs.num_repeat, config.trainer_common.val_pass_n)


def model_path(path: str, key: str, search: Sequence[Path]) -> str:
    """Return the folder or Hugging Face name of a model.

    Args:
        path: a folder, a Hugging Face name, or `package.module->function`, a function that returns a folder.
        key: the configuration key or option that has `path`, for messages.

    Raises:
        ModelError: a local path does not exist, or contains no model.
        PluginError: the function cannot be loaded.
    """
    if "->" in path:
        return str(_checked_folder(_call_folder_function(path, search), f"{path} returned"))
    local = local_model(path, key, search)
    if local is None:
        logger.info("{} {!r} is not a local folder; loading it from Hugging Face", key, path)
        return path
    relative = Path(path).expanduser()
    return str(relative) if (Path.cwd() / relative).exists() else str(local)


def local_model(path: str, key: str, search: Sequence[Path]) -> Path | None:
    """Return a model's folder, for the arguments of `model_path`; None for a Hugging Face name.

    ModelError: a local path does not exist, or contains no model.
    """
    relative = Path(path).expanduser()
    local = next((match for folder in search if (match := folder / relative).exists()), None)
    if local is not None:
        return _checked_folder(local, f"{key} is")
    # The name of a model on Hugging Face has at most one slash.
    if path.startswith(("/", ".", "~")) or path.count("/") > 1 or path.endswith("/"):
        hint = _near_model(relative, search)
        if not hint:
            parents = [parent for folder in search if (parent := (folder / relative).parent).is_dir()]
            names = [entry.name for parent in parents for entry in parent.iterdir() if entry.is_dir()]
            hint = did_you_mean(
                relative.name, names, "; did you mean {}?", show=lambda name: repr(str(relative.with_name(name)))
            )
        raise ModelError(f"{key} is {path!r}, which does not exist; a folder in transformers' format is expected{hint}")
    records = [file for folder in search for file in (folder / relative.parts[0]).glob("*/environment.json")]
    if relative.parts[0] == _RECORDS or records:
        raise ModelError(
            f"{key} is {path!r}, which does not exist: no run of this name has started here; `astuner runs` lists the "
            f"runs{_near_model(relative, search)}"
        )
    return None


def _call_folder_function(path: str, search: Sequence[Path]) -> Path:
    function = load_function(path, search=search)
    try:
        return Path(function())
    except AstunerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"model.path {path!r} did not return a folder: {type(error).__name__}: {error} (at {raised_at(error)})"
        ) from error


def _near_model(path: Path, search: Sequence[Path]) -> str:
    """Return a question with the model of a run, for a path near it: RUN, RUN/models, RUN/model/step_10; or ""."""
    for folder in search:
        for near in (folder / path, *(folder / path).parents[:3]):
            if near != folder and (near / "model/config.json").exists():
                return f"; did you mean {str(near / 'model')!r}?"
    return ""


def _checked_folder(folder: Path, subject: str) -> Path:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{subject} {str(folder)!r}, which {kind}; a folder in transformers' format is expected")
    if not (folder / "config.json").exists():
        if (folder / "environment.json").exists() and not (folder / "model/config.json").exists():
            checkpoints = sorted(folder.glob("checkpoints/step_*/model/config.json"))
            hint = f"; its last checkpoint has {str(checkpoints[-1].parent)!r}" if checkpoints else ""
            raise ModelError(
                f"{subject} {str(folder)!r}, a run that has not finished: its tuned model is written at the end{hint}"
            )
        contents = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        inside = next((name for name in ("model", "merged_model") if (folder / name / "config.json").exists()), None)
        hint = f"; did you mean {str(folder / inside)!r}?" if inside else ""
        raise ModelError(
            f"{subject} {str(folder)!r}, which is not a model: it has no config.json but contains {contents}{hint}"
        )
    return folder
