"""On-policy distillation: a teacher scores the tokens that the model in training has sampled."""

from __future__ import annotations

from astuner.algorithms.distillation.distiller import Distiller, RowTeacher, load_distiller
from astuner.algorithms.distillation.teachers import ModelTeacher, ServerTeacher, Teacher, TeacherSequence

__all__ = ["Distiller", "ModelTeacher", "RowTeacher", "ServerTeacher", "Teacher", "TeacherSequence", "load_distiller"]
