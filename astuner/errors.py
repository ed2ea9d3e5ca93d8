"""The errors that astuner raises. Each message has what was given, what was expected, and how to fix it.

AstunerError
x ConfigError
x PluginError
x TaskDataError
x ModelError
x BackboneError
  + NoSignalError
x RecordError
x InstallError
x SandboxError
x ServiceError
x EpisodeError
  + WorkflowError
  + JudgeError
    o JudgeUnavailableError
      - JudgeBudgetError
  + UnscoredError
  + UnjudgedError
  + EpisodeTimeout
  + ContextLengthError
  + CallLimitError
  + AgentMadness
  + InvalidRequestError
    o UnsupportedParameterError
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError

_MAX_MESSAGE = 2000
_MAX_REPR = 300
_MAX_SUB_EXCEPTIONS = 3
_MAX_GROUP_TEXT = 200
_WORD = re.compile(r"[\w./:@\\\-+%]+")
_DIGIT = re.compile(r"\d")
_HEX = re.compile(r"[0-9a-f]{12,}", re.IGNORECASE)
_REPEATED_PARTS = re.compile(r"#(?:[\s,;:'\"()\[\]]*#)+")


class AstunerError(Exception):
    """Base class of all errors that astuner raises. The CLI prints the message without a traceback."""


class ConfigError(AstunerError):
    """A key, value or file of the configuration is invalid."""


class PluginError(AstunerError):
    """A path such as `package.module->Class` cannot be loaded, or names the wrong kind of object."""


class TaskDataError(AstunerError):
    """A task file or one of its rows cannot be read."""


class ModelError(AstunerError):
    """The model or its tokenizer cannot be loaded or used."""


class BackboneError(AstunerError):
    """The backbone is unknown, packages for it are missing, or its training cannot continue."""


class NoSignalError(BackboneError):
    """No group had reward variance for the configured number of steps."""


class LogprobGapError(BackboneError):
    """The rollout's and the trainer's logprobs differ by more than rounding.

    Attributes:
        text: What is wrong.
        fix: What to change.
    """

    def __init__(self, text: str, fix: str) -> None:
        super().__init__(f"{text}. To fix it: {fix}")
        self.text = text
        self.fix = fix


class RecordError(AstunerError):
    """The run record cannot be written or read."""


class InstallError(AstunerError):
    """The environment of a backbone cannot be installed, is missing, or is broken."""


class SandboxError(AstunerError):
    """The system cannot run a program in a sandbox."""


class ServiceError(AstunerError):
    """A service of the run cannot be started, does not become ready, or its port is taken."""


class EpisodeError(AstunerError):
    """An episode failed. The run counts the failure and continues.

    Attributes:
        kind: Short name under which the run record counts the failure.
    """

    kind = "episode"


class WorkflowError(EpisodeError):
    """The workflow raised an error or did not return a `WorkflowOutput`."""

    kind = "workflow"


class EnvError(EpisodeError):
    """An environment failed, or rejected a request."""

    kind = "environment"


class JudgeError(EpisodeError):
    """The judge raised an error or did not return a reward."""

    kind = "judge"


class JudgeUnavailableError(JudgeError):
    """The judge cannot score any further episode, for example because its API keys have expired. It stops the run."""

    kind = "judge_unavailable"


class JudgeBudgetError(JudgeUnavailableError):
    """The budget of the judge's LLM (`task_judge.llm.max_tokens`, `task_judge.llm.max_cost`) is used up."""

    kind = "judge_budget"


class UnscoredError(EpisodeError):
    """A judge cannot score an episode. The episode has no reward, and is counted under its cause.

    Attributes:
        kind: `unscored`, or `unscored/CAUSE`.
        cause: A short name of the cause, for example `rate_limit`; "" for none.
    """

    kind = "unscored"

    def __init__(self, message: str, cause: str = "") -> None:
        super().__init__(message)
        self.cause = cause
        if cause:
            self.kind = f"{UnscoredError.kind}/{cause}"

    def __reduce__(self) -> tuple[type[UnscoredError], tuple[str, str]]:
        return type(self), (str(self), self.cause)


class UnjudgedError(EpisodeError):
    """An episode waits for the other episodes of its task, with which it is judged (see `BaseGroupJudge`)."""

    kind = "unjudged"


class EpisodeTimeout(EpisodeError):
    """The episode or its judge exceeded the configured timeout."""

    kind = "timeout"


class ContextLengthError(EpisodeError):
    """A prompt is longer than the configuration or the model allows."""

    kind = "context_length"


class CallLimitError(EpisodeError):
    """The episode exceeded `rollout.multi_turn.max_steps` LLM calls.

    `ModelTuner.chat` raises it instead of answering. It ends the workflow; `rollout.multi_turn.on_max_steps` decides
    whether the episode is then judged or fails. A workflow may catch it and return its own output.
    """

    kind = "max_steps"


class EpisodeStopped(BaseException):
    """Ends a workflow that has caught `CallLimitError` and keeps calling the model.

    It is not an `Exception`, so that a handler of all exceptions around a model call does not catch it.
    """


class AgentMadness(EpisodeError):
    """The model produced degenerate output (`rollout.compute_madness_checklist`).

    The episode ends with the reward that is configured for this case.
    """

    kind = "madness"


class InvalidRequestError(EpisodeError):
    """A request to the model has an invalid parameter.

    Attributes:
        name: The name of the parameter, in OpenAI's API; None if the request as a whole is invalid.
    """

    kind = "invalid_request"

    def __init__(self, message: str, name: str | None = None) -> None:
        super().__init__(message)
        self.name = name

    def __reduce__(self) -> tuple[type[InvalidRequestError], tuple[str, str | None]]:
        return type(self), (str(self), self.name)


class UnsupportedParameterError(InvalidRequestError):
    """A request has a parameter, or a value of one, that cannot be honoured. Parameters are never ignored."""

    kind = "unsupported_parameter"


def shorten(text: str, limit: int = 200) -> str:
    """Return a text for a message; if it is longer than `limit`, its beginning, its end and its length."""
    if len(text) <= limit:
        return text
    return f"{text[: limit // 2]}… ({len(text):,} characters) …{text[-limit // 4 :]}"


def counted(number: float, noun: str) -> str:
    """Return a whole number with its noun, for example `1,234 episodes`."""
    return f"{number:,.0f} {noun}" + ("" if number == 1 else "s")


def did_you_mean(
    name: object,
    choices: Iterable[str],
    text: str = "did you mean {}?",
    *,
    show: Callable[[str], str] = repr,
    most: int = 1,
    cutoff: float = 0.6,
) -> str:
    """Return a hint for a message about an unknown name: the most similar choices, or "" if none is similar.

    Args:
        name: the unknown name.
        choices: the known names.
        text: the hint, with `{}` in the place of the choices.
        show: returns a choice as it is written in the hint.
        most: maximum number of choices in the hint.
        cutoff: minimum similarity, from 0 to 1 (`difflib.get_close_matches`).
    """
    folded = {choice.casefold(): choice for choice in choices}  # `GRPO` for `grpo`
    similar = get_close_matches(str(name).casefold(), folded, most, cutoff)
    return text.format(" or ".join(show(folded[each]) for each in similar)) if similar else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message without the final full stop.

    The name of the error's type comes first, except for `OSError` and `ValueError`.
    """
    line = str(error).strip().partition("\n")[0].rstrip(".")
    return line if isinstance(error, OSError | ValueError) and line else f"{type(error).__name__}: {line}"


# The objects below come from the user's code. Their methods may raise anything, such as SystemExit, or return instances
# of `str` subclasses. `isinstance` would read their `__class__`.


def field_problems(error: ValidationError, whole: str = "") -> list[str]:
    """Return the problems that pydantic has found, as `field: message`; `whole` names the value itself."""
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    return [f"{'.'.join(map(str, problem['loc'])) or whole}: {problem['msg']}" for problem in problems]


def message_of(error: BaseException) -> str:
    """Return the message from an exception in the user's code, cut to 2,000 characters. Never raises."""
    message = text_of(error)
    return message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}… ({len(message):,} characters)"


_COROUTINE = re.compile("""['"]coroutine['"]""")


def describe_error(error: BaseException) -> str:
    """Return `Type: message` for an exception in the user's code. Never raises.

    For an exception group, the text includes the first exceptions of the group. The message is cut to 2,000 characters.
    If the code used a coroutine as if it were its result, the text says how to fix it.
    """
    text = f"{type(error).__name__}: {message_of(error)}"
    if type(error) in (AttributeError, TypeError) and _COROUTINE.search(text):
        text += "; write `await` in front of the call that returned the coroutine"
    if _is_group(error):
        parts = [f"{type(part).__name__}: {message_of(part)}" for part in leaf_exceptions(error)]
        text += f": {'; '.join(parts)}"[:_MAX_MESSAGE]
    return text


def leaf_exceptions(error: BaseException) -> list[BaseException]:
    """Return the first exceptions in an exception group that are not groups, or `[error]` if it is not a group."""
    leaves: list[BaseException] = []
    groups = [error]
    exceptions: Any = BaseExceptionGroup.exceptions  # a subclass may override it
    while groups and len(leaves) < _MAX_SUB_EXCEPTIONS:
        current = groups.pop()
        if _is_group(current):
            groups.extend(reversed(exceptions.__get__(current)))
        else:
            leaves.append(current)
    return leaves


def _is_group(error: BaseException) -> bool:
    return issubclass(type(error), BaseExceptionGroup)


def short_repr(value: object) -> str:
    """Return the `repr` of an object from the user's code, cut to 300 characters. Never raises."""
    text = text_of(value, _SHORT.repr)
    return text if len(text) <= _MAX_REPR else f"{text[:_MAX_REPR]}…"


_SHORT = reprlib.Repr()
_SHORT.maxdict = _SHORT.maxlist = _SHORT.maxtuple = _SHORT.maxset = _SHORT.maxfrozenset = 20
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = _MAX_REPR


def text_of(value: object, convert: Callable[[Any], str] = str) -> str:
    """Return the `str` of an object from the user's code, or a note in angle brackets if that raises. Never raises.

    Args:
        value: any object.
        convert: the function to use instead of `str`.
    """
    try:
        return str.__str__(convert(value))
    except BaseException:
        return f"<{type(value).__name__} that cannot be shown>"


def without_variable_parts(message: str) -> str:
    """Return an error message with `#` for its numbers, ids, addresses and paths that have digits.

    Two messages with the same result belong to one group. Lists of such parts, however long, become one `#`.
    """

    def replace(word: re.Match[str]) -> str:
        # A word with a digit is a number, an id, an address, a port, or a path with a version or a temporary file.
        return "#" if _DIGIT.search(word[0]) or _HEX.fullmatch(word[0]) else word[0]

    text = _REPEATED_PARTS.sub("#", _WORD.sub(replace, message))
    return " ".join(text.split())[:_MAX_GROUP_TEXT]
