"""Sections that say what to learn from: `data`, `task_reader`, `task_judge`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from astuner.config.section import Section


class DataConfig(Section):
    """`data`: prompt and response length, batch size."""

    max_prompt_length: PositiveInt = 3000
    """The most tokens of an episode's first prompt; an episode with a longer one fails and is counted."""
    max_response_length: PositiveInt = 15000
    """The most tokens that may follow the first prompt within an episode (answers, tool results, new turns)."""
    train_batch_size: PositiveInt = 32
    """Tasks per training step; a step has train_batch_size × rollout.num_repeat episodes."""
    shuffle: bool = True
    """Shuffle the training tasks anew each epoch, by trainer_common.seed."""


class DatasetFileSplit(Section):
    """One split of `dataset_file`."""

    file_path: str = ""
    """A .jsonl, .json, .csv or .parquet file, or `package.module->function`, which makes it and returns its path."""


class FieldMapping(Section):
    """Which field of a data row becomes which field of a task."""

    task_id: str | None = None
    """The row's id; without it, `task_id` or `id` where the row has one, else a stable hash of the row's content."""
    main_query: str | None = None
    """The question; without it, the first of main_query, question, query, problem, prompt, instruction, input."""
    init_messages: str | None = None
    """Chat messages that precede the question; without it, `init_messages` or `messages` where the row has one."""


class DatasetFileConfig(Section):
    """`task_reader.dataset_file`: tasks from local files."""

    training: DatasetFileSplit = DatasetFileSplit()
    """Training tasks."""
    validation: DatasetFileSplit = DatasetFileSplit()
    """Validation tasks; leave file_path empty for none."""
    fields: FieldMapping = FieldMapping()
    """Field mapping for rows that use other names."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read, and count them, instead of stopping at the first."""


class HuggingFaceConfig(Section):
    """`task_reader.huggingface_dat_repo`: tasks from a Hugging Face data set."""

    dataset_path: str = "gsm8k"
    """A hub name (`gsm8k`), one with its subset (`gsm8k/main`, `openai/gsm8k/main`), or a folder in hub layout."""
    dataset_name: str | None = None
    """The subset (configuration) of the data set, where dataset_path does not carry it."""
    training_split: str = "train"
    """Name of the training split."""
    validation_split: str | None = "validation"
    """Name of the validation split; null for none."""
    fields: FieldMapping = FieldMapping()
    """Field mapping for rows that use other names."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read, and count them, instead of stopping at the first."""


class EnvServiceConfig(Section):
    """`task_reader.env_service`: tasks from an environment service."""

    env_type: str = "appworld"
    """The type of environment, as initialised in the service."""
    env_url: str = "http://127.0.0.1:8080"
    """Where the service listens."""
    env_action_preference: Literal["code", "text", "box"] = "code"
    """The form of actions that the environment prefers."""
    training_split: str = "train"
    """Name of the training split."""
    validation_split: str = "dev"
    """Name of the validation split."""


class TaskReaderConfig(Section):
    """`task_reader`: where tasks come from."""

    type: Literal["env_service", "dataset_file", "huggingface_dat_repo"] = "huggingface_dat_repo"
    """Which reader: env_service, dataset_file or huggingface_dat_repo."""
    dataset_file: DatasetFileConfig = DatasetFileConfig()
    """Used when type is dataset_file."""
    huggingface_dat_repo: HuggingFaceConfig = HuggingFaceConfig()
    """Used when type is huggingface_dat_repo."""
    env_service: EnvServiceConfig = EnvServiceConfig()
    """Used when type is env_service."""


class RubricsConfig(Section):
    """`task_judge.rubrics_auto_grader`: grading by an LLM with learned rubrics."""

    model_name: str = "qwen-max"
    """The grading model."""
    grader_mode: Literal["pointwise", "listwise"] = "pointwise"
    """Score one answer at a time, or rank a group."""
    language: Literal["en", "zh"] = "en"
    """Language of prompts, tasks and answers."""
    min_score: float = 0
    """Lowest score."""
    max_score: float = 1
    """Highest score."""
    success_threshold: float = 0.7
    """A score from here on counts as success."""
    sampling_mode: Literal["all_samples", "smart"] = "all_samples"
    """Which samples the rubrics are learned from."""
    generate_number: PositiveInt = 1
    """Rubrics proposed per sample."""
    max_epochs: PositiveInt = 2
    """Rounds of proposing and revising."""
    max_retries: PositiveInt = 3
    """Attempts per request."""
    aggregation_mode: Literal["keep_all", "categorize", "merge_similar"] = "keep_all"
    """How proposed rubrics are brought together."""
    grader_name: str = "auto_grader"
    """Name of the grader in logs."""
    num_reference_samples: PositiveInt = 20
    """How many reference samples to learn from."""
    query_field: str = "main_query"
    """Field that holds the question."""
    answer_field: str = "final_answer"
    """Field that holds the agent's answer."""
    reference_field: str = "answer"
    """Field that holds the reference answer."""
    input_data_type: Literal["env_service", "dataset_file", "huggingface_dat_repo"] = "dataset_file"
    """Which reader loads the reference samples."""
    dataset_file: DatasetFileConfig = DatasetFileConfig()
    """Reference samples, when input_data_type is dataset_file."""


class TaskJudgeConfig(Section):
    """`task_judge`: how episodes are scored."""

    judge_type: Literal["customized_protocol", "rubrics_auto_grader"] = "customized_protocol"
    """customized_protocol: the class of judge_protocol; rubrics_auto_grader: an LLM with learned rubrics."""
    judge_protocol: str | None = None
    """`package.module->Class`, a BaseJudge; null where the workflow returns rewards itself."""
    timeout: Annotated[float, Field(gt=0)] = 60.0
    """Seconds that the judge may take for one episode."""
    alien_llm_model: str = "qwen3-235b-a22b-instruct-2507"
    """The helper model that a judge may ask."""
    alien_llm_response_length: PositiveInt = 512
    """The most tokens of the helper model's answer."""
    rubrics_auto_grader: RubricsConfig = RubricsConfig()
    """Used when judge_type is rubrics_auto_grader."""
