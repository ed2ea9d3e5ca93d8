"""Adapters on verl's workers; in a file of its own, as a process has one Ray at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astuner.errors import BackboneError
from tests.backbone.verl.clusters import made_episodes, small_run, started
from tests.backbone.verl.local_side import local, saved

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_adapters_reach_the_engines_merged(model_folder: Path, tmp_path: Path):
    from astuner.backbone.verl.sync_check import check_first_sync

    config = small_run(model__lora__rank=4, trainer_common__optim__lr=0.1)
    with started(config, model_folder, 2, tmp_path) as cluster:
        cluster.trainer.sync_weights(0)
        cluster.update().step(made_episodes(local(model_folder).logprobs), 1)
        with pytest.raises(BackboneError, match="did not sample with the trained weights"):
            check_first_sync(cluster.trainer, cluster.engine, [5, 6, 7], torch.float32, 1.0)
        cluster.trainer.sync_weights(1)
        check_first_sync(cluster.trainer, cluster.engine, [5, 6, 7], torch.float32, 1.0)
        merged = local(model_folder)
        now = saved(cluster.trainer, tmp_path / "model")
        assert now.keys() == merged.policy.model.state_dict().keys()
