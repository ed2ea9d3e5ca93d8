"""LoRA adapters on verl's workers. In a separate file, since a process can use only one Ray at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from astuner.errors import BackboneError
from tests.backbone.verl.clusters import make_episodes, small_run, started_cluster
from tests.backbone.verl.local_reference import local_reference, saved_weights

pytestmark = [pytest.mark.verl, pytest.mark.slow]


def test_adapters_are_synced_to_the_engines_merged(model_folder: Path, tmp_path: Path):
    from astuner.backbone.training.sync_certificate import SyncCertificate
    from astuner.backbone.verl.trainer import certify_sync

    certificate = SyncCertificate(torch.float32)
    config = small_run(model__lora__rank=4, trainer_common__optim__lr=0.1)
    with started_cluster(config, model_folder, 2, tmp_path) as cluster:
        cluster.trainer.sync_weights(0)
        certify_sync(cluster.trainer, certificate, 0, [5, 6, 7], 1.0)
        cluster.update().step(make_episodes(local_reference(model_folder).logprobs), 1)
        # The engines sleep, and keep the weights from before the adapters were trained.
        with pytest.raises(BackboneError, match=r"engine 1 of 2 .*_proj\.weight.*the new ones have not arrived"):
            certify_sync(cluster.trainer, certificate, 1, [5, 6, 7], 1.0)
        cluster.trainer.sync_weights(1)
        certify_sync(cluster.trainer, certificate, 1, [5, 6, 7], 1.0)
        merged = local_reference(model_folder)
        now = saved_weights(cluster.trainer, tmp_path / "model")
        assert now.keys() == merged.policy.model.state_dict().keys()
