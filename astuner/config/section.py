"""The base of every configuration section."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A frozen section: unknown keys fail, and the docstring under a field is the field's documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
