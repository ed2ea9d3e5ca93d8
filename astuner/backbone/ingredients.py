"""What the user brings, loaded and checked: workflow, tasks, judge, and the model's tokenizer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from loguru import logger

from astuner.breakpoints import any_chosen
from astuner.config.data import TaskJudgeConfig
from astuner.config.root import AstunerConfig
from astuner.errors import AstunerError, ConfigError, ModelError, PluginError
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import CallSettings, ChatCodec, FrozenModel, Targets, load_tokenizer
from astuner.plugin import load_class, load_function, raised_at
from astuner.schema import TaskSet
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_reader import read_tasks
from astuner.task_rollout import RunningEpisodes, TaskRollout
from astuner.task_runner import TaskRunner
from astuner.workflow import Workflow


@dataclass(frozen=True)
class Ingredients:
    """The user's parts of a run.

    Attributes:
        tasks: training and validation tasks.
        model_path: a local folder or a Hugging Face name.
        tokenizer: of that model.
        codec: messages to ids and back.
        workflow: the class to tune; None for supervised training.
        judge: None where the workflow scores itself.
        search: absolute folders where the user's code and relative paths are looked for.
    """

    tasks: TaskSet
    model_path: str
    tokenizer: Any
    codec: ChatCodec
    workflow: type[Workflow] | None
    judge: BaseJudge | None
    search: tuple[Path, ...] = ()

    def rollout(self, config: AstunerConfig, engine: LlmEngine, running: RunningEpisodes) -> TaskRollout:
        """Return what runs episodes against `engine`, and tells `running` of them."""
        if self.workflow is None:
            raise ConfigError("rollout.agentscope_workflow is not set, so there is no agent to run")
        runner = TaskRunner(
            workflow=self.workflow,
            judge=self.judge,
            engine=engine,
            codec=self.codec,
            episode_timeout=config.rollout.episode_timeout,
            judge_timeout=config.task_judge.timeout,
            max_samples=config.rollout.multi_turn.max_sample_per_task,
            targets=_targets(config),
            merge="none" if config.update.pack == "none" else "leaf",
            madness_reward=config.rollout.agent_madness_reward,
            judges_in_place=one_at_a_time(config),
        )
        debugs = config.backbone == "debug"
        return TaskRollout(
            runner,
            workers=config.debug.debug_max_parallel if debugs else config.rollout.max_env_worker,
            max_retries=config.rollout.max_retries,
            in_main_thread=one_at_a_time(config),
            running=running,
        )


def _targets(config: AstunerConfig) -> Targets:
    """Return which of the workflow's agents are trained, and what answers for the others.

    Raises:
        ConfigError: the environment lacks an endpoint's key.
    """
    frozen = {}
    for tag, model in config.rollout.frozen_models.items():
        key = api_key(f"rollout.frozen_models.{tag}.api_key_env", model.api_key_env)
        # The client wants some key even for an endpoint that needs none.
        frozen[tag] = FrozenModel(model.model, model.base_url, key or "none")
    trainable = config.rollout.trainable_targets
    return Targets(None if trainable is None else tuple(trainable), frozen)


def api_key(setting: str, variable: str | None) -> str | None:
    """Return the value of the environment variable that `setting` names; None where it names none.

    Raises:
        ConfigError: there is no such variable.
    """
    key = os.environ.get(variable) if variable else None
    if variable and not key:
        raise ConfigError(
            f"{setting} names the environment variable {variable}, which is not set; export it, or leave api_key_env "
            "out if the server needs no key"
        )
    return key


def gather(config: AstunerConfig, config_dir: Path, model: str | None = None) -> Ingredients:
    """Load what the user brings; cheap mistakes are found before anything slow is done.

    Args:
        config: the resolved configuration.
        config_dir: the YAML's folder.
        model: a model to use instead of `model.path`.

    Raises:
        AstunerError: whatever is wrong with any of it.
    """
    search = (Path.cwd(), config_dir.absolute())
    workflow, judge = _load_agent(config, search)
    supervised = config.trainer_common.algorithm.adv_estimator == "sft"
    tasks = read_tasks(config.task_reader, base_dir=config_dir, search=search, transcripts=supervised)
    path = model_path(model, "--model", search) if model else model_path(config.model.path, "model.path", search)
    tokenizer = load_tokenizer(path)
    codec = ChatCodec(tokenizer, config.model.renderer)
    return Ingredients(tasks, path, tokenizer, codec, workflow, judge, search)


def gather_agent(config: AstunerConfig, search: Sequence[Path], model_path: str) -> Ingredients:
    """Load what another process of the same run needs to run episodes: everything but the tasks.

    Args:
        config: the resolved configuration.
        search, model_path: of the run's own `Ingredients`.

    Raises:
        AstunerError: whatever is wrong with any of it.
    """
    workflow, judge = _load_agent(config, search)
    tokenizer = load_tokenizer(model_path)
    codec = ChatCodec(tokenizer, config.model.renderer)
    return Ingredients(TaskSet((), ()), model_path, tokenizer, codec, workflow, judge, tuple(search))


def _load_agent(config: AstunerConfig, search: Sequence[Path]) -> tuple[type[Workflow] | None, BaseJudge | None]:
    """Return workflow and judge, where there are any; supervised training has neither."""
    workflow = judge = None
    if config.trainer_common.algorithm.adv_estimator == "sft":
        return None, None
    if config.rollout.agentscope_workflow:
        workflow = load_class(config.rollout.agentscope_workflow, Workflow, search=search)  # type: ignore[type-abstract]
    if config.task_judge.judge_protocol:
        judge = _make_judge(config.task_judge.judge_protocol, config.task_judge, search)
    return workflow, judge


def one_at_a_time(config: AstunerConfig) -> bool:
    """Whether episodes run one by one in the main thread: for debuggers, which then stop the whole run."""
    return config.backbone == "debug" and (any_chosen() or config.debug.debug_max_parallel == 1)


def call_settings(config: AstunerConfig, *, validation: bool) -> CallSettings:
    """Return what holds for every LLM call of a training or validation episode."""
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
    )


def validation_repeats(config: AstunerConfig) -> int:
    """Return the number of validation episodes per task."""
    return max(config.rollout.val_kwargs.num_repeat, config.trainer_common.val_pass_n)


def _make_judge(path: str, config: TaskJudgeConfig, search: Sequence[Path]) -> BaseJudge:
    """Return the judge that `path` names.

    Raises:
        PluginError: there is none, or it cannot be made.
    """
    judge_class = load_class(path, BaseJudge, search=search)  # type: ignore[type-abstract]
    try:
        return judge_class(config)
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"task_judge.judge_protocol `{path}` could not be made from its configuration section: "
            f"{type(error).__name__}: {error} (at {raised_at(error)})"
        ) from error


def model_path(path: str, key: str, search: Sequence[Path]) -> str:
    """Return a folder or hub name; `package.module->function` is called to make the folder.

    Args:
        path: as given.
        key: who gave it, for messages.
        search: where relative folders are looked for.

    Raises:
        ModelError: a path that looks local does not exist.
        PluginError: the function leads nowhere.
    """
    if "->" in path:
        return str(_checked_folder(_made_folder(path, search), f"{path} returned"))
    given = Path(path).expanduser()
    local = next((place for folder in search if (place := folder / given).exists()), None)
    if local is None and path.startswith(("/", ".", "~")):
        raise ModelError(f"{key} is {path!r}, which does not exist; {_expected(given, search)}")
    if local is None:
        logger.info("{} {!r} is no folder here; looking for it on Hugging Face", key, path)
        return path
    folder = _checked_folder(local, f"{key} is")
    return str(given) if (Path.cwd() / given).exists() else str(folder)


def _made_folder(path: str, search: Sequence[Path]) -> Path:
    make = load_function(path, search=search)
    try:
        return Path(make())
    except AstunerError:
        raise
    except (Exception, SystemExit) as error:
        raise ModelError(
            f"model.path {path!r} did not return a folder: {type(error).__name__}: {error} (at {raised_at(error)})"
        ) from error


def _expected(given: Path, search: Sequence[Path]) -> str:
    """Say what is expected, with folders of nearly that name."""
    parents = [parent for folder in search if (parent := (folder / given).parent).is_dir()]
    names = [entry.name for parent in parents for entry in parent.iterdir() if entry.is_dir()]
    near = get_close_matches(given.name, names, 1)
    hint = f"; did you mean {str(given.with_name(near[0]))!r}?" if near else ""
    return f"a folder in transformers' format is expected{hint}"


def _checked_folder(folder: Path, what: str) -> Path:
    if not folder.is_dir():
        kind = "is a file" if folder.exists() else "does not exist"
        raise ModelError(f"{what} {str(folder)!r}, which {kind}; a folder in transformers' format is expected")
    if not (folder / "config.json").exists():
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())[:8]) or "nothing"
        raise ModelError(f"{what} {str(folder)!r}, which holds no config.json and so is no model (it holds {found})")
    return folder
