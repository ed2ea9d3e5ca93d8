"""The base of every configuration section."""

from __future__ import annotations

from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Section(BaseModel):
    """A frozen section: unknown keys fail, and the docstring under a field is the field's documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false where a number is meant: pydantic would read them as 1 and 0."""
        if isinstance(value, bool) and info.field_name is not None:
            kinds = plain_kinds(cls.model_fields[info.field_name].annotation)
            if bool not in kinds and (int in kinds or float in kinds):
                raise ValueError("expected a number")
        return value


def plain_kinds(annotation: Any) -> list[Any]:
    """The types that an annotation allows: the branches of a union, bounds taken off."""
    branches = get_args(annotation) if get_origin(annotation) in _UNIONS else (annotation,)
    return [get_args(branch)[0] if get_origin(branch) is Annotated else branch for branch in branches]


_UNIONS = (UnionType, Union)
