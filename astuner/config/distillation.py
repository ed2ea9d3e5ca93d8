"""Section on distillation from a teacher: `trainer_common.distillation`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from astuner.config.conditions import NO_TEACHER, NO_TEACHER_SERVER
from astuner.config.section import Seconds, Section, key, unsupported

SELF = "self"
"""The teacher that is the model in training."""
TEACHER_KEY = "trainer_common.distillation.teacher"
"""The key that names the teacher, for messages."""


def is_server(teacher: str | None) -> bool:
    """Return whether a teacher is the address of a server."""
    return teacher is not None and teacher.startswith(("http://", "https://"))


class DistillationConfig(Section):
    """`trainer_common.distillation`: on-policy distillation. The teacher scores the tokens that the model sampled."""

    teacher: str | None = key(
        None,
        unsupported=(
            unsupported(
                SELF,
                by=("trinity",),
                why="its trainer has the model in other processes; name a folder or the address of a server, or use "
                "--backbone=local or --backbone=verl",
            ),
        ),
        resume="path",
    )
    """A model folder, the URL of a vLLM server, or self (the model in training, with a hint); null for no teacher."""
    teacher_model: str | None = key(None, no_effect=(NO_TEACHER_SERVER,), resume="any")
    """The name of the model on the teacher's server; null is the only model that it serves."""
    api_key_env: str | None = key(None, no_effect=(NO_TEACHER_SERVER,), resume="any")
    """Environment variable with the API key of the teacher's server."""
    request_timeout: Seconds = key(120.0, no_effect=(NO_TEACHER_SERVER,), resume="any")
    """Time limit of one request to the teacher's server, in seconds."""
    coef: Annotated[float, Field(gt=0, le=1000)] = key(1.0, no_effect=(NO_TEACHER,))
    """Factor of log teacher - log model, minus its mean, which is added to the advantage of each token."""
    reward_coef: Annotated[float, Field(ge=0, le=1000)] = key(0.0, no_effect=(NO_TEACHER,))
    """Factor of the advantages of the rewards; 0 learns from the teacher alone."""
    hint: str | None = key(None, no_effect=(NO_TEACHER,))
    """Text for the teacher only, at the end of each request, with {fields} of the task, {reward} and {explanation}."""


def teacher_folder(config: DistillationConfig) -> str | None:
    """Return the teacher if it is a model to load; None for a server, the model in training, or no teacher."""
    teacher = config.teacher
    return None if teacher is None or teacher == SELF or is_server(teacher) else teacher
