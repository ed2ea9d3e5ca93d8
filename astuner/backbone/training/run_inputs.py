"""The user's inputs of a run, loaded and checked: workflow, tasks, judge, model path and tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from astuner.backbone.training.episode_placement import has_agent, parallel_episodes, runs_inline, uses_workers
from astuner.backbone.training.model_folder import local_model, model_path
from astuner.backbone.training.task_files import check_tasks_named, with_task_files
from astuner.config.agent_loop import SUMMARY_TARGET
from astuner.config.conditions import samples_in_validation
from astuner.config.data import TaskReaderConfig
from astuner.config.distillation import TEACHER_KEY, teacher_folder
from astuner.config.keys import KeyPath
from astuner.config.root import AstunerConfig
from astuner.config.services import api_key
from astuner.doors import through_door
from astuner.env_service.addresses import EnvServiceAddress, service_address
from astuner.env_service.episodes import EpisodeEnvironments
from astuner.errors import ConfigError
from astuner.gateway import Gateway, GatewaySettings
from astuner.llm_engine.context_length import check_context_length, shortened_context
from astuner.llm_engine.protocol import LlmEngine
from astuner.model_tuner import SAMPLING_PARAMETERS, CallSettings, ChatCodec, FrozenModel, Targets, load_tokenizer
from astuner.plugin import reject_missing
from astuner.run_record.findings import RunFinding
from astuner.schema import LlmCall, TaskSet
from astuner.system.redaction.output import redacted_output
from astuner.task_judge.judge_base import BaseJudge
from astuner.task_judge.loading import judge_paths, make_judge
from astuner.task_reader import read_tasks
from astuner.task_reader.dataset_file import check_files
from astuner.task_rollout import ActiveEpisodes, TaskRollout, WorkerProcesses
from astuner.task_runner import TaskRunner
from astuner.tools import sandbox_agentscope
from astuner.workflow import Workflow, load_workflow

if TYPE_CHECKING:
    from astuner.diagnostics import Monitor
    from astuner.task_judge.rubrics_auto_grader import Rubrics

_NO_AGENT = (
    "rollout.agentscope_workflow is not set; set it to the agent, `package.module->Name`, or set workflow.command to "
    "the command line of a program, or rollout.use_agentscope_protocol to False"
)


@dataclass(frozen=True)
class RunInputs:
    """The user's inputs of a run.

    Attributes:
        tasks: training and validation tasks.
        model_path: a local folder or a Hugging Face name.
        tokenizer: the tokenizer of that model.
        codec: converts messages to token ids and back.
        workflow: returns a new workflow; None for supervised training, and in the main process of a run whose worker
            processes load it.
        judge: the judge; None if the workflow returns its reward, and where `workflow` is None.
        search: absolute folders that are searched for the user's code and for relative paths.
        env_services: the environment services by their addresses as configured.
        rubrics: the learned rubrics of the judge; None if it has none.
        teacher_path: the folder or Hugging Face name of the teacher's model; None without one.
        workers: the processes that run the episodes; None if this process does, or those of Ray do.
    """

    tasks: TaskSet
    model_path: str
    tokenizer: Any
    codec: ChatCodec
    workflow: Callable[[], Workflow] | None
    judge: BaseJudge | None
    search: tuple[Path, ...] = ()
    env_services: Mapping[str, EnvServiceAddress] = field(default_factory=dict)
    rubrics: Rubrics | None = None
    teacher_path: str | None = None
    workers: WorkerProcesses | None = None

    def monitor(self, config: AstunerConfig, record: Callable[[RunFinding], None], *, trains: bool) -> Monitor:
        """Return the monitor of a run, which gives its findings to `record`.

        Args:
            config: the resolved configuration.
            record: called with every finding.
            trains: whether the run trains, or tries out a training.
        """
        monitor: Monitor = through_door("diagnostics", "monitor").of(
            config, self.tasks, self.codec, self.model_path, record, trains=trains
        )
        return monitor

    def rollout(
        self,
        config: AstunerConfig,
        engine: LlmEngine,
        active_episodes: ActiveEpisodes,
        on_call: Callable[[LlmCall], None] | None = None,
    ) -> TaskRollout:
        """Return a rollout that runs episodes in this process.

        Args:
            config: the resolved configuration.
            engine: the model.
            active_episodes: registers the running episodes.
            on_call: called with each finished LLM call, in the thread of its episode.
        """
        if self.workflow is None:
            raise ConfigError(_NO_AGENT)
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
            on_max_steps=config.rollout.multi_turn.on_max_steps,
            judge_inline=runs_inline(config),
            on_call=on_call,
            gateway=self._gateway(config),
            environments=EpisodeEnvironments(self.env_services),
        )
        sandbox_agentscope(enabled=config.rollout.sandbox)
        return TaskRollout(
            runner,
            workers=parallel_episodes(config),
            max_retries=config.rollout.max_retries,
            in_main_thread=runs_inline(config),
            running=active_episodes,
        )

    def _gateway(self, config: AstunerConfig) -> Gateway:
        settings = config.gateway
        names = ("astuner", config.model.path, self.model_path, *settings.model_names)
        return Gateway(
            GatewaySettings(
                settings.host,
                settings.port,
                tuple(dict.fromkeys(names)),
                settings.max_concurrent_calls,
                settings.max_body_bytes,
                settings.drain_seconds,
            )
        )


def _targets(config: AstunerConfig) -> Targets:
    """Return which workflow agents are trained, and the models for the agents that are not.

    Raises:
        ConfigError: the environment variable of an endpoint's key is not set.
    """
    frozen = {}
    for tag, model in config.rollout.frozen_models.items():
        key = api_key(f"rollout.frozen_models.{tag}.api_key_env", model.api_key_env)
        # The client requires a key even if the endpoint does not.
        frozen[tag] = FrozenModel(model.model, model.base_url, key or "none")
    history = config.context_tracker
    if not config.rollout.use_agentscope_protocol and history.auto_context_cm.base_url is not None:
        key = api_key("context_tracker.auto_context_cm.api_key_env", history.auto_context_cm.api_key_env)
        url = history.auto_context_cm.base_url
        frozen[SUMMARY_TARGET] = FrozenModel(history.alien_llm_model, url, key or "none", SUMMARY_TARGET)
    trainable = config.rollout.trainable_targets
    return Targets(None if trainable is None else tuple(trainable), frozen, config.workflow.agents)


def load_run_inputs(
    config: AstunerConfig,
    config_dir: Path,
    model: str | None = None,
    env_service: EnvServiceAddress | None = None,
) -> RunInputs:
    """Load the user's inputs. Cheap checks run before slow steps.

    Args:
        config: the resolved configuration.
        config_dir: the YAML's folder.
        model: a model to use instead of `model.path`.
        env_service: the environment service that the run has started.

    Raises:
        AstunerError: an input cannot be loaded.
    """
    search = (Path.cwd(), config_dir.absolute())
    in_workers = uses_workers(config)
    if in_workers and not has_agent(config):
        raise ConfigError(_NO_AGENT)
    workflow, judge = (None, None) if in_workers else _load_agent(config, search)
    supervised = config.trainer_common.algorithm.adv_estimator == "sft"
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
        judge = None if in_workers else through_door("judge", "rubrics_grader")(config.task_judge, rubrics)
    return RunInputs(tasks, path, tokenizer, codec, workflow, judge, search, env_services, rubrics, teacher_path)


def check_references(
    config: AstunerConfig, config_dir: Path, origins: Mapping[KeyPath, str], model: str | None = None
) -> None:
    """Check that tasks are named, and that the user's classes, files and model exist.

    PyTorch and user code are not imported.

    Args:
        config: the resolved configuration.
        config_dir: the YAML's folder.
        origins: where the user set each key.
        model: a model to use instead of `model.path`.

    Raises:
        ConfigError: no tasks are named.
        PluginError, TaskDataError, ModelError: one does not exist.
    """
    check_tasks_named(config.task_reader, origins)
    search = (Path.cwd(), config_dir.absolute())
    reader = config.task_reader
    paths = [path for path in (reader.type, *(part.type for part in reader.mixture)) if "->" in path]
    paths += [entry.function for entry in reader.filters if entry.type == "function"]
    sources = (reader.feedback_tracing, *(part.feedback_tracing for part in reader.mixture))
    paths += [source.redact for source in sources if source.redact]
    if config.trainer_common.algorithm.adv_estimator != "sft":
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


def load_rubrics(
    config: AstunerConfig, config_dir: Path, search: Sequence[Path], env_service: EnvServiceAddress | None
) -> Rubrics:
    """Load or learn the rubrics of the judge.

    Raises:
        AstunerError: the samples cannot be read, or no rubrics can be learned.
    """
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


def load_agent_inputs(
    config: AstunerConfig,
    search: Sequence[Path],
    model_path: str,
    codec: ChatCodec | None = None,
    env_services: Mapping[str, EnvServiceAddress] | None = None,
    rubrics: Rubrics | None = None,
) -> RunInputs:
    """Load the inputs that a worker process needs to run episodes: all except the tasks.

    Args:
        config: the resolved configuration.
        search, model_path, env_services, rubrics: as in the `RunInputs` of the main process.
        codec: the codec of the model; None to load it.

    Raises:
        AstunerError: an input cannot be loaded.
    """
    workflow, judge = _load_agent(config, search)
    if rubrics is not None:
        judge = through_door("judge", "rubrics_grader")(config.task_judge, rubrics)
    codec = codec or ChatCodec(load_tokenizer(model_path), config.model.renderer)
    return RunInputs(
        TaskSet((), ()), model_path, codec.tokenizer, codec, workflow, judge, tuple(search), env_services or {}
    )


def _load_agent(
    config: AstunerConfig, search: Sequence[Path]
) -> tuple[Callable[[], Workflow] | None, BaseJudge | None]:
    """Return the workflow and the judge, each if configured; supervised training has neither."""
    workflow: Callable[[], Workflow] | None = None
    judge = None
    if config.trainer_common.algorithm.adv_estimator == "sft":
        return None, None
    if config.rollout.agentscope_workflow:
        workflow = load_workflow(config.rollout.agentscope_workflow, search=search)
    elif config.workflow.command is not None:
        workflow = through_door("workflow", "command")(config, search)
    elif not config.rollout.use_agentscope_protocol:
        workflow = through_door("workflow", "environment")(config, search)
    if config.task_judge.judge_protocol and not config.task_judge.learns_rubrics:
        judge = make_judge(config.task_judge.judge_protocol, config.task_judge, config.task_judge.params, search)
    return workflow, judge


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
    if not samples_in_validation(config):
        return 1
    return max(config.rollout.val_kwargs.num_repeat, config.trainer_common.val_pass_n)
