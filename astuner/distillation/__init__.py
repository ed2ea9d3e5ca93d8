"""On-policy distillation: a teacher scores the tokens that the model in training has sampled."""

from __future__ import annotations

from astuner.distillation.distiller import Distiller, RowTeacher
from astuner.distillation.loading import load_distiller
from astuner.distillation.model_teacher import ModelTeacher
from astuner.distillation.server_teacher import ServerTeacher
from astuner.distillation.teacher import Teacher, TeacherSequence

__all__ = ["Distiller", "ModelTeacher", "RowTeacher", "ServerTeacher", "Teacher", "TeacherSequence", "load_distiller"]
