"""Sections on the tasks and their rewards: `data`, `task_reader`, `task_judge`."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from astuner.config.section import (
    ANY_CLASS,
    FOR_SFT,
    TRAINING,
    Condition,
    Count,
    NonNegativeInt,
    Number,
    PositiveInt,
    Seconds,
    Section,
    Seed,
    Variant,
    key,
    mirrors,
    sets,
    when,
)
from astuner.config.services import JudgeLlmConfig, http_address
from astuner.config.task_selection import CurriculumConfig, TaskFilter
from astuner.config.task_sources import DataGenerationConfig, FeedbackTracingConfig

if TYPE_CHECKING:
    from astuner.config.root import AstunerConfig


def _starts_env_service(run: AstunerConfig) -> bool:
    reader = run.task_reader
    parts = reader.mixture if reader.type == "mixture" else [reader]
    return any(part.type == "env_service" and part.env_service.env_url == "auto" for part in parts)


def _may_ask_a_model(run: AstunerConfig) -> bool:
    """Return whether a judge may ask the helper model: the user's judges and some of astuner's."""
    judge = run.task_judge
    path = judge.judge_protocol or "astuner."
    return (
        judge.learns_rubrics
        or not path.startswith("astuner.")
        or path.startswith("astuner.task_judge.llm.")
        or path.endswith("->MathAnswerAndLlmAsJudge")
        or "->" in str(judge.params)  # of a judge that is composed of others
    )


_NO_OWN_ENV_SERVICE = Condition(
    "without an env_url: auto of task_reader.env_service", lambda run: not _starts_env_service(run)
)
_NO_JUDGE = Condition("without a task_judge.judge_protocol", lambda run: not run.task_judge.has_judge)
_NO_JUDGE_MODEL = Condition(
    "because the judge asks no other model", lambda run: not _may_ask_a_model(run), at_default=True
)
EnvUrl = Annotated[str, AfterValidator(lambda url: url if url == "auto" else http_address(url))]
_OWN_JUDGE = Variant("while {} is rubrics_auto_grader", lambda judge: bool(judge != "rubrics_auto_grader"))


class DataConfig(Section):
    """`data`: prompt and response length, batch size."""

    max_prompt_length: PositiveInt = key(
        3000,
        no_effect=(FOR_SFT,),
        verl=mirrors("data.max_prompt_length"),
        trinity="an episode with a longer first prompt fails",
    )
    """Maximum number of tokens in an episode's first prompt; an episode with a longer one fails and is counted."""
    max_response_length: PositiveInt = key(
        15000,
        verl=mirrors("data.max_response_length", "actor_rollout_ref.actor.loss_scale_factor"),
        trinity="limits an episode, and is part of some losses' weights",
    )
    """Maximum number of tokens after an episode's first prompt (answers, tool results, new turns)."""
    train_batch_size: Count = key(
        32,
        verl=mirrors("data.train_batch_size")
        + mirrors("actor_rollout_ref.actor.ppo_mini_batch_size", rule="mini_batch_tasks"),
        trinity=sets("buffer.batch_size") + sets("buffer.train_batch_size", rule="expected_samples"),
    )
    """Tasks per training step; a step has train_batch_size × rollout.num_repeat episodes."""
    shuffle: bool = key(True, used_by=TRAINING, trainers="tasks have the same order as on the local backbone")
    """Shuffle the training tasks in each epoch, seeded by trainer_common.seed."""


class DatasetFileSplit(Section):
    """One split of `dataset_file`."""

    file_path: str = key("", resume="path")
    """A .jsonl, .json, .csv or .parquet file, or `package.module->function` that creates it and returns its path."""


class FieldMapping(Section):
    """Names of the data row's fields that become task fields."""

    task_id: str | None = None
    """The row's id. Default: `task_id` or `id` if the row has one, else a stable hash of the row's content."""
    main_query: str | None = None
    """The question. Default: the first of main_query, question, query, problem, prompt, instruction, input."""
    init_messages: str | None = None
    """Chat messages before the question. Default: `init_messages` or `messages` if the row has one."""


class DatasetFileConfig(Section):
    """`task_reader.dataset_file`: tasks from local files."""

    training: DatasetFileSplit = DatasetFileSplit()
    """Training tasks."""
    validation: DatasetFileSplit = DatasetFileSplit()
    """Validation tasks; leave file_path empty for none."""
    fields: FieldMapping = FieldMapping()
    """Field names, for rows with other names."""
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read, instead of stopping at the first."""


class HuggingFaceConfig(Section):
    """`task_reader.huggingface_dat_repo`: tasks from a Hugging Face dataset."""

    dataset_path: str = key("gsm8k", resume="path")
    """A hub name (`gsm8k`), a name with its subset (`gsm8k/main`, `openai/gsm8k/main`), or a folder in hub layout."""
    dataset_name: str | None = None
    """The subset (configuration) of the dataset, if dataset_path does not contain it."""
    training_split: str = "train"
    """Name of the training split."""
    validation_split: str | None = "validation"
    """Name of the validation split; null for none."""
    fields: FieldMapping = FieldMapping()
    """Field names, for rows with other names."""
    skip_bad_rows: bool = False
    """Skip and count rows that cannot be read, instead of stopping at the first."""


class EnvLimitsConfig(Section):
    """`task_reader.env_service.limits`: limits of the service that a run starts (`env_url: auto`)."""

    max_instances: PositiveInt | None = None
    """Maximum number of instances; null for twice rollout.max_env_worker, and at least 128."""
    idle_seconds: Seconds = 600.0
    """Release an instance after this time without a request."""
    step_timeout: Seconds = 60.0
    """Time limit of a reset, a step or an evaluation, seconds. An instance that exceeds it ends."""
    max_observation_bytes: PositiveInt = 2**20
    """Maximum size of an observation, in bytes. Larger ones are errors."""


class EnvServiceConfig(Section):
    """`task_reader.env_service`: tasks of an environment, and its instances for their episodes."""

    env_type: str = "appworld"
    """The environment, as the service calls it: FAMILY/NAME, `package.module->Class`, or the name that --env gives."""
    env_params: dict[str, Any] = key({})
    """The keyword arguments of the environment."""
    env_url: EnvUrl = key("http://127.0.0.1:8080", resume="any")
    """Address of the service, or auto to start one for the run. The variable ASTUNER_ENV_TOKEN has its token."""
    limits: EnvLimitsConfig = key(EnvLimitsConfig(), no_effect=(_NO_OWN_ENV_SERVICE,), resume="any")
    """Limits of a service that the run starts."""
    env_action_preference: Literal["code", "text", "box"] = "code"
    """The form of actions that the environment asks for, if it has several."""
    training_split: str = "train"
    """Name of the training split."""
    validation_split: str | None = "validation"
    """Name of the validation split; null for none."""


class RandomDummyConfig(Section):
    """`task_reader.random_dummy`: tasks with random text, for trying out a configuration."""

    training_tasks: PositiveInt = 64
    """Number of training tasks."""
    validation_tasks: NonNegativeInt = 16
    """Number of validation tasks; 0 for none."""
    min_words: Count = 4
    """Minimum number of words in a question."""
    max_words: Count = 32
    """Maximum number of words in a question."""
    seed: Seed = 0
    """The tasks are the same for the same seed."""

    @model_validator(mode="after")
    def _check_words(self) -> Self:
        if self.min_words > self.max_words:
            raise ValueError("expected min_words not above max_words")
        return self


def _class_path(path: str) -> str:
    if "->" not in path:
        raise ValueError("a class, `package.module->Class`")
    return path


ReaderClass = Annotated[str, AfterValidator(_class_path)]
ReaderType = Literal[
    "env_service",
    "dataset_file",
    "huggingface_dat_repo",
    "random_dummy",
    "seeds",
    "feedback_tracing",
    "data_generation",
]

MAX_SEED_TASKS = 1_000_000
"""Maximum number of tasks in a split, if task_reader.type is seeds."""


class _Readers(Section):
    """The keys of the single readers."""

    chosen_by: ClassVar[str] = "type"

    dataset_file: DatasetFileConfig = key(DatasetFileConfig(), variant="dataset_file")
    """Used if type is dataset_file."""
    huggingface_dat_repo: HuggingFaceConfig = key(HuggingFaceConfig(), variant="huggingface_dat_repo")
    """Used if type is huggingface_dat_repo."""
    env_service: EnvServiceConfig = key(EnvServiceConfig(), variant="env_service")
    """Used if type is env_service."""
    random_dummy: RandomDummyConfig = key(RandomDummyConfig(), variant="random_dummy")
    """Used if type is random_dummy."""
    feedback_tracing: FeedbackTracingConfig = key(FeedbackTracingConfig(), variant="feedback_tracing")
    """Used if type is feedback_tracing."""
    data_generation: DataGenerationConfig = key(DataGenerationConfig(), variant="data_generation")
    """Used if type is data_generation."""
    options: dict[str, Any] = key({}, variant=ANY_CLASS)
    """Keyword arguments of the class, if type is `package.module->Class`."""
    count: Annotated[int, Field(gt=0, le=MAX_SEED_TASKS)] = key(64, variant="seeds")
    """Number of training tasks, if type is seeds."""
    validation_count: Annotated[int, Field(ge=0, le=MAX_SEED_TASKS)] = key(16, variant="seeds")
    """Number of validation tasks, if type is seeds; 0 for none. Training tasks never have their seeds."""
    first_seed: Annotated[int, Field(ge=0, le=2**31 - 1)] = key(0, variant="seeds")
    """Seed of the first training task, if type is seeds; the others follow it."""


class _WeightedReader(Section):
    """The keys that every entry of `task_reader.mixture` has, whatever its reader."""

    type: ReaderType | ReaderClass
    """The reader, as in task_reader.type."""
    weight: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """The share of the reader's tasks in the training batches, relative to the other weights."""
    name: Annotated[str, Field(pattern=r"^[\w.-]*$")] = ""
    """Prefix of the task ids, and the name in `Task.source`. Default: the reader's type, or the name of its class."""


# pydantic puts the fields of the last base class first, and files list `type` first.
class MixturePart(_Readers, _WeightedReader):
    """An entry in `task_reader.mixture`: a reader and its share of the training tasks."""


def part_names(parts: Sequence[MixturePart]) -> list[str]:
    """Return a name for each reader in a mixture; names that are not set are unique."""
    names: list[str] = []
    taken = [part.name for part in parts]
    for part in parts:
        default = part.type.rpartition("->")[2].strip()
        numbered = (default if number == 1 else f"{default}-{number}" for number in count(1))
        names.append(part.name or next(name for name in numbered if name not in names and name not in taken))
    return names


class _ReaderType(Section):
    """The choice of the reader."""

    type: ReaderType | Literal["mixture"] | ReaderClass = "huggingface_dat_repo"
    """The reader: one of those whose sections follow, mixture, or your own class (`package.module->Class`)."""


class TaskReaderConfig(_Readers, _ReaderType):
    """`task_reader`: the source of the tasks."""

    mixture: list[MixturePart] = key([], variant="mixture")
    """The readers that are mixed if type is mixture, each with type, weight, name and the section of its type."""
    filters: list[TaskFilter] = key([])
    """Filters of the tasks, applied in order: length, deduplicate, regex, function and difficulty."""
    curriculum: CurriculumConfig = key(
        CurriculumConfig(),
        used_by=TRAINING,
        no_effect=(when("task_reader.curriculum.enable", False),),
        trainers="draws the tasks of each step",
    )
    """Choice of the training tasks by their recent success."""


class SampleHuggingFaceConfig(HuggingFaceConfig):
    """`task_judge.rubrics_auto_grader.huggingface_dat_repo`: reference samples from a Hugging Face dataset."""

    validation_split: str | None = None
    """Name of the split that is held out; null to hold out a part of the training split."""


class SampleEnvServiceConfig(EnvServiceConfig):
    """`task_judge.rubrics_auto_grader.env_service`: reference samples from the tasks of an environment."""

    validation_split: str | None = None
    """Name of the split that is held out; null to hold out a part of the training split."""


class RubricsConfig(Section):
    """`task_judge.rubrics_auto_grader`: grading by an LLM with learned rubrics."""

    model_name: str = "qwen-max"
    """The grading model."""
    grader_mode: Literal["pointwise", "listwise"] = "pointwise"
    """Score one answer at a time, or rank a group."""
    language: Literal["en", "zh"] = "en"
    """Language of prompts, tasks and answers."""
    min_score: Number = 0
    """Lowest score."""
    max_score: Number = 1
    """Highest score."""
    success_threshold: Number = 0.7
    """Lowest score that counts as success."""
    sampling_mode: Literal["all_samples", "smart"] = "all_samples"
    """all_samples proposes rubrics for every sample; smart stops when further samples bring no new ones."""
    generate_number: Count = 1
    """Rubrics proposed per sample."""
    max_epochs: PositiveInt = 2
    """Number of rounds in which the rubrics are tested and revised."""
    max_retries: Count = 3
    """Maximum number of retries for a question to the grading model after endpoint errors."""
    aggregation_mode: Literal["keep_all", "categorize", "merge_similar"] = "keep_all"
    """Keep all proposed rubrics, group them in categories, or merge similar ones."""
    grader_name: str = "auto_grader"
    """Name of the grader in logs and in its rubrics' file."""
    num_reference_samples: Count = 20
    """Number of reference samples; a quarter is held out to measure the agreement."""
    query_field: str = "main_query"
    """Field with the question."""
    answer_field: str = "final_answer"
    """Field with the agent's answer."""
    reference_field: str = "answer"
    """Field with the reference answer."""
    input_data_type: Literal["env_service", "dataset_file", "huggingface_dat_repo"] = "dataset_file"
    """The reader of the reference samples."""
    dataset_file: DatasetFileConfig = DatasetFileConfig()
    """Reference samples, if input_data_type is dataset_file. The split validation is held out, if there is one."""
    huggingface_dat_repo: SampleHuggingFaceConfig = SampleHuggingFaceConfig()
    """Reference samples, if input_data_type is huggingface_dat_repo."""
    env_service: SampleEnvServiceConfig = SampleEnvServiceConfig()
    """Reference samples, if input_data_type is env_service: the tasks of an environment."""
    score_field: str = "score"
    """Field with the score of the sample's own answer (answer_field), from min_score to max_score."""
    custom_evaluation_prompt: str | None = None
    """Instructions to the grading model; {rubrics}, {min_score} and {max_score} are replaced. Default: built in."""
    rubrics_path: str | None = key(None, resume="path")
    """YAML file of rubrics to use; if it does not exist, they are learned and written to it. Default: in the cache."""


class TaskJudgeConfig(Section):
    """`task_judge`: how episodes are scored."""

    chosen_by: ClassVar[str] = "judge_type"

    judge_type: Literal["customized_protocol", "rubrics_auto_grader"] = "customized_protocol"
    """customized_protocol: the class of judge_protocol; rubrics_auto_grader: an LLM with learned rubrics."""
    judge_protocol: str | None = key(None, variant=_OWN_JUDGE, resume="path")
    """`package.module->Class`, a BaseJudge; null if the workflow returns rewards itself."""
    params: dict[str, Any] = key({}, variant=_OWN_JUDGE, no_effect=(_NO_JUDGE,))
    """The keyword arguments of the judge's class, for example pattern for RegexAsJudge."""
    timeout: Seconds = key(60.0, no_effect=(_NO_JUDGE,))
    """Time limit of the judge for one episode, in seconds."""
    alien_llm_model: str = key("qwen3-235b-a22b-instruct-2507", variant=_OWN_JUDGE, no_effect=(_NO_JUDGE_MODEL,))
    """The helper model that a judge may ask."""
    alien_llm_response_length: PositiveInt = key(512, no_effect=(_NO_JUDGE_MODEL,))
    """Maximum number of tokens in the helper model's answer."""
    llm: JudgeLlmConfig = key(JudgeLlmConfig(), no_effect=(_NO_JUDGE_MODEL,))
    """The helper model's endpoint, and the limits of its use."""
    rubrics_auto_grader: RubricsConfig = key(RubricsConfig(), variant="rubrics_auto_grader")
    """Used if judge_type is rubrics_auto_grader."""

    @property
    def has_judge(self) -> bool:
        """Whether a judge scores the episodes whose workflow returns no reward."""
        return self.judge_type == "rubrics_auto_grader" or self.judge_protocol is not None

    @property
    def learns_rubrics(self) -> bool:
        """Whether the judge is a grader with learned rubrics."""
        return self.judge_type == "rubrics_auto_grader"
