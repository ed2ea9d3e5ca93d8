"""On-policy distillation: a teacher scores the tokens that the model in training has sampled."""

from __future__ import annotations

from astuner.algorithms.distillation.distiller import Distiller, RowTeacher
from astuner.algorithms.distillation.loading import load_distiller
from astuner.algorithms.distillation.model_teacher import ModelTeacher
from astuner.algorithms.distillation.server_teacher import ServerTeacher
from astuner.algorithms.distillation.teacher import Teacher, TeacherSequence

__all__ = ["Distiller", "ModelTeacher", "RowTeacher", "ServerTeacher", "Teacher", "TeacherSequence", "load_distiller"]
