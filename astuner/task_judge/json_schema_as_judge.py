"""The judge for answers that must be JSON of a schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NoReturn

from astuner.config.data import TaskJudgeConfig
from astuner.errors import JudgeError, shorten
from astuner.schema import Judgement, WorkflowOutput, WorkflowTask
from astuner.task_judge.judge_base import BaseJudge, answer_text, of_task, task_value

_FENCED = re.compile(r"```(?:json)?[ \t]*\n(.*?)```", re.DOTALL)


class JsonSchemaAsJudge(BaseJudge):
    """Validates the answer with a JSON schema (https://json-schema.org); the reward is 1.0 or 0.0.

    The answer is the text as a whole or, if that is not JSON, its last fenced code block. References to other documents
    are not loaded.

    Args:
        schema: the schema of all tasks; by default, the schema is in the metadata of the task.
        schema_field: the schema in the metadata of the task, a mapping or JSON text.
        answer_field: the answer in the metadata of the workflow's output.
    """

    def __init__(
        self,
        config: TaskJudgeConfig,
        *,
        schema: Mapping[str, Any] | None = None,
        schema_field: str = "schema",
        answer_field: str = "final_answer",
    ) -> None:
        super().__init__(config)
        self.schema_field, self.answer_field = schema_field, answer_field
        self._validator = None if schema is None else _validator(schema)

    def compute_reward(self, workflow_task: WorkflowTask, workflow_output: WorkflowOutput) -> Judgement:
        """Score one episode; the components are `json` (the answer is JSON) and `schema` (it also has the schema).

        Raises:
            JudgeError: the answer or the schema is missing or of another type, or the schema is invalid.
        """
        name = type(self).__name__
        validator = self._validator
        if validator is None:
            schema = task_value(workflow_task, self.schema_field, name)
            try:
                validator = _validator(json.loads(schema) if isinstance(schema, str) else schema)
            except ValueError as error:
                raise JudgeError(f"{self.schema_field!r} in {of_task(workflow_task)} is {error}") from error
        try:
            value = _parse(answer_text(workflow_output, self.answer_field, name))
        except (ValueError, RecursionError) as error:
            return Judgement(0.0, False, {"json": 0.0, "schema": 0.0}, explanation=f"not JSON: {shorten(str(error))}")
        try:
            errors = sorted(validator.iter_errors(value), key=lambda error: [str(part) for part in error.absolute_path])
        except RecursionError:
            return Judgement(0.0, False, {"json": 1.0, "schema": 0.0}, explanation="the answer is nested too deeply")
        except Exception as error:  # the validator raises errors of many types for references that it cannot resolve
            raise JudgeError(f"the schema cannot be applied: {type(error).__name__}: {shorten(str(error))}") from error
        if not errors:
            return Judgement(1.0, True, {"json": 1.0, "schema": 1.0})
        text = f"{len(errors)} errors; at {errors[0].json_path}: {shorten(errors[0].message, 400)}"
        return Judgement(0.0, False, {"json": 1.0, "schema": 0.0}, explanation=text)


def _validator(schema: object) -> Any:
    import referencing
    from jsonschema import SchemaError
    from jsonschema.validators import validator_for

    if not isinstance(schema, Mapping):
        raise ValueError(f"not a JSON schema: expected a mapping, got {type(schema).__name__}")
    cls = validator_for(schema)
    try:
        cls.check_schema(schema)
    except SchemaError as error:
        raise ValueError(f"not a JSON schema: at {error.json_path}: {shorten(error.message)}") from error
    return cls(schema, registry=referencing.Registry())


def _parse(text: str) -> Any:
    """Return the JSON value of an answer."""
    try:
        return json.loads(text, parse_constant=_reject)
    except ValueError:
        blocks = _FENCED.findall(text)
        if not blocks:
            raise
        return json.loads(blocks[-1], parse_constant=_reject)


def _reject(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
