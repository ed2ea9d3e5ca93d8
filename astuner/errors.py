"""The errors that astuner raises.

Each message says what was given, what was expected and how to mend it.

    AstunerError
    ├── ConfigError              a key, value or file of the configuration (names file and line)
    ├── PluginError              `package.module->Class` does not lead to what it should
    ├── TaskDataError            a task file or row that cannot be read
    ├── ModelError               the model or its tokenizer cannot be loaded or used
    ├── BackboneError            unknown backbone, missing packages, training cannot go on
    │   └── NoSignalError        nothing could be learned for the configured number of steps
    ├── RecordError              the run record cannot be written or read
    ├── InstallError             a backbone's environment cannot be made, is not there, or is broken
    ├── ServiceError             a service that the run needs cannot be started, or finds its port taken
    └── EpisodeError             one episode went wrong: data for the run, never a crash of it
        ├── WorkflowError        the workflow raised or returned something that is no WorkflowOutput
        ├── JudgeError           the judge raised or returned something that is no (reward, is_success)
        ├── EpisodeTimeout       the episode or its judge took longer than allowed
        ├── ContextLengthError   a prompt longer than the configuration or the model allows
        ├── CallLimitError       more LLM calls than rollout.multi_turn.max_steps
        └── AgentMadness         the model lost control; ends the episode with its configured reward
"""

from __future__ import annotations


class AstunerError(Exception):
    """Base of all errors that astuner raises on purpose; the CLI prints its message without a traceback."""


class ConfigError(AstunerError):
    """A key, value or file of the configuration is wrong."""


class PluginError(AstunerError):
    """A `package.module->Class` path does not lead to what it should."""


class TaskDataError(AstunerError):
    """A task file or row cannot be read."""


class ModelError(AstunerError):
    """The model or its tokenizer cannot be loaded or used."""


class BackboneError(AstunerError):
    """The backbone is unknown, lacks packages, or its training cannot go on."""


class NoSignalError(BackboneError):
    """No group had reward variance for the configured number of steps, so nothing can be learned."""


class RecordError(AstunerError):
    """The run record cannot be written or read."""


class InstallError(AstunerError):
    """A backbone's isolated environment cannot be made, is not there, or is broken."""


class ServiceError(AstunerError):
    """A service that the run needs cannot be started, does not become ready, or finds its port taken."""


class EpisodeError(AstunerError):
    """One episode went wrong; the run counts it and goes on.

    `kind` is the short word under which the run record counts it.
    """

    kind = "episode"


class WorkflowError(EpisodeError):
    """The workflow raised, or returned something that is no `WorkflowOutput`."""

    kind = "workflow"


class JudgeError(EpisodeError):
    """The judge raised, or returned something that is no `(reward, is_success)`."""

    kind = "judge"


class EpisodeTimeout(EpisodeError):
    """The episode or its judge took longer than the configuration allows."""

    kind = "timeout"


class ContextLengthError(EpisodeError):
    """A prompt is longer than the configuration or the model allows."""

    kind = "context_length"


class CallLimitError(EpisodeError):
    """The episode made more LLM calls than `rollout.multi_turn.max_steps`."""

    kind = "max_steps"


class AgentMadness(EpisodeError):
    """The model lost control (`rollout.compute_madness_checklist`); the episode ends with its configured reward."""

    kind = "madness"
