"""Loads the teacher of a run."""

from __future__ import annotations

import torch

from astuner.algorithms.distillation.distiller import Distiller
from astuner.algorithms.distillation.hints import check_hint
from astuner.algorithms.distillation.model_teacher import ModelTeacher
from astuner.algorithms.distillation.server_teacher import ServerTeacher
from astuner.algorithms.distillation.teacher import Teacher
from astuner.config.distillation import SELF, TEACHER_KEY, is_server
from astuner.config.root import AstunerConfig
from astuner.config.services import api_key
from astuner.errors import ModelError, short_repr
from astuner.llm_engine.causal_lm import compute_dtype, load_causal_lm
from astuner.model_tuner import ChatCodec, load_tokenizer
from astuner.schema import TaskSet


def load_distiller(
    config: AstunerConfig,
    codec: ChatCodec,
    tasks: TaskSet | None,
    *,
    teacher_path: str | None,
    device: torch.device,
    policy: Teacher | None = None,
) -> Distiller | None:
    """Return the distiller of a run, or None if it has no teacher.

    Args:
        config: the resolved configuration.
        codec: the codec of the model in training.
        tasks: the tasks of the run; the first one shows which fields a hint can have. None if they were checked.
        teacher_path: the folder of the teacher, if it is one.
        device: the device of a teacher that is loaded.
        policy: the model in training, for the teacher `self`.

    Raises:
        ConfigError: the hint has a field that the tasks do not have, or the variable of the API key is not set.
        ModelError: the teacher cannot be loaded or reached, or has another tokenizer.
    """
    settings = config.trainer_common.distillation
    if settings.teacher is None:
        return None
    if settings.hint is not None and tasks is not None and tasks.training:
        check_hint(settings.hint, tasks.training[0])
    max_tokens = config.trainer_common.max_tokens_per_micro_batch
    teacher: Teacher
    if settings.teacher == SELF:
        assert policy is not None
        teacher = policy
    elif is_server(settings.teacher):
        teacher = ServerTeacher.connect(
            settings.teacher,
            model=settings.teacher_model,
            api_key=api_key("trainer_common.distillation.api_key_env", settings.api_key_env),
            timeout=settings.request_timeout,
        )
    else:
        assert teacher_path is not None
        _check_tokenizer(codec, teacher_path)
        model = load_causal_lm(teacher_path, compute_dtype(config.model.dtype, device))
        teacher = ModelTeacher(model.to(device).eval().requires_grad_(False), max_tokens)
    return Distiller(settings, teacher, codec)


def _check_tokenizer(codec: ChatCodec, path: str) -> None:
    """Check that a teacher has the token ids of the model in training.

    Raises:
        ModelError: a token has another id.
    """
    own, others = codec.tokenizer.get_vocab(), load_tokenizer(path, TEACHER_KEY).get_vocab()
    different = sorted(token for token in own.keys() | others.keys() if own.get(token) != others.get(token))
    if different:
        token = different[0]
        teacher_id, model_id = (each.get(token, "no id") for each in (others, own))
        raise ModelError(
            f"trainer_common.distillation.teacher {path!r} has another tokenizer than model.path: the ids of "
            f"{len(different)} of {len(own)} tokens differ, for example that of {short_repr(token)}: {teacher_id} "
            f"instead of {model_id}; name a teacher of the same model family"
        )
