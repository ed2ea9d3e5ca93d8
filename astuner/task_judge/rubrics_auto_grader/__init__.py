"""A grader that learns its rubrics from reference samples."""

from astuner.task_judge.rubrics_auto_grader.grader import Rubrics, make_grader
from astuner.task_judge.rubrics_auto_grader.learning import load_or_learn_rubrics

__all__ = ["Rubrics", "load_or_learn_rubrics", "make_grader"]
