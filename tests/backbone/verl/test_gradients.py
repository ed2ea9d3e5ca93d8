"""The gradient of a training step on verl equals that of the algorithm's published formula, computed in float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from astuner.algorithms.distillation.teachers import ModelTeacher, TeacherSequence
from astuner.algorithms.registry import resolve
from astuner.config.root import AstunerConfig
from astuner.config.trainer import PackMode
from tests.backbone.published_steps import STEPS, assert_gradient, plain_model, published_step

pytestmark = pytest.mark.verl


PADDED_OR_PACKED = pytest.mark.parametrize("remove_padding", [False, True], ids=["padded", "packed"])
# Padded rows, packed rows, and packed rows whose common prefixes are computed once.
LAYOUTS = pytest.mark.parametrize(
    ("remove_padding", "pack"), [(False, "auto"), (True, "leaf"), (True, "tree")], ids=["padded", "packed", "tree"]
)


@LAYOUTS
@pytest.mark.parametrize("name", STEPS)
def test_gradient_of_a_step_is_that_of_the_published_formula(
    model_folder: Path, name: str, remove_padding: bool, pack: PackMode
) -> None:
    from astuner.backbone.verl.loss import row_loss
    from astuner.backbone.verl.update import VerlUpdate
    from tests.backbone.verl.in_process import InProcessTrainer, cpu_process_group

    step = published_step(name, model_folder)
    config = step.config()
    loss = row_loss(config, torch.float32, other_engine=False)
    trainer = InProcessTrainer(plain_model(model_folder), loss, remove_padding=remove_padding, pack=pack)
    algorithm = resolve(config.trainer_common.algorithm)
    update = VerlUpdate(config, algorithm, trainer, torch.float32, total_steps=1, pad_token=0, distiller=step.distiller)
    # The logprobs of the answers are not those of the policy, on purpose.
    update._check_logprob_gap = lambda *_: None  # type: ignore[method-assign]
    with cpu_process_group():
        update.step(step.episodes, 1)
    assert_gradient(trainer.worker.gradient, step, model_folder)


@PADDED_OR_PACKED
def test_the_policy_as_its_own_teacher_scores_as_the_local_backbone(model_folder: Path, remove_padding: bool) -> None:
    from astuner.backbone.verl.loss import row_loss
    from astuner.backbone.verl.session import PolicyTeacher
    from tests.backbone.verl.in_process import InProcessTrainer, cpu_process_group

    model = plain_model(model_folder)
    loss = row_loss(AstunerConfig(), torch.float32, other_engine=False)
    teacher = PolicyTeacher(InProcessTrainer(model, loss, remove_padding=remove_padding))
    sequences = [
        TeacherSequence((5, 6, 7, 8, 9, 10), [(2, 4), (5, 6)], (1.0, 1.0)),
        TeacherSequence((11, 12, 13), [(1, 3)], (1.0,)),
    ]
    with cpu_process_group():
        scored = teacher.logprobs(sequences)
        assert teacher.logprobs([]) == []
    for values, expected in zip(scored, ModelTeacher(model, 64).logprobs(sequences), strict=True):
        np.testing.assert_allclose(values, expected, atol=1e-5)
