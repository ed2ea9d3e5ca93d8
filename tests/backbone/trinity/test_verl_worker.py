"""The micro-batches of verl's workers under Trinity: their cost is bounded, and the update is the same."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.backbone.published_steps import plain_model

pytestmark = pytest.mark.trinity

LENGTHS = (30, 3, 4, 3, 5, 3, 12, 2)
"""Together 62 tokens, which verl would pad to 8 x 30."""
BUDGET = 64


def make_engine(module: torch.nn.Module) -> Any:
    """Return astuner's engine around a model, without FSDP."""
    from trinity.trainer.verl.monkey_patch import patch_verl_engine

    from astuner.backbone.trinity.verl_worker import BoundedEngine

    class Engine(BoundedEngine):
        def __init__(self) -> None:
            self.module = module
            self.engine_config = SimpleNamespace(entropy_checkpointing=False)
            self.ulysses_device_mesh, self.use_ulysses_sp, self.ulysses_sequence_parallel_size = None, False, 1
            self._autocast_dtype = torch.float32

        def get_data_parallel_group(self) -> None:
            return None

        def get_data_parallel_size(self) -> int:
            return 1

    patch_verl_engine()
    return Engine()


def rows() -> Any:
    """Return rows of different lengths, of which the second halves are trained."""
    from tensordict import TensorDict

    random = np.random.default_rng(0)
    ids = [torch.tensor(random.integers(1, 100, length)) for length in LENGTHS]
    columns = {
        "input_ids": ids,
        "position_ids": [torch.arange(len(row)) for row in ids],
        "loss_mask": [(torch.arange(len(row)) >= len(row) // 2).long() for row in ids],
    }
    nested = {name: torch.nested.as_nested_tensor(column, layout=torch.jagged) for name, column in columns.items()}
    return TensorDict(nested, batch_size=[len(ids)])


def updated(
    folder: Path, monkeypatch: pytest.MonkeyPatch, budget: int, *, is_bounded: bool
) -> tuple[float, torch.Tensor, list[int], list[torch.Tensor]]:
    """Compute the gradient of a loss; return loss, gradient, tokens of each forward pass, and log-probabilities."""
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from verl.utils import tensordict_utils

    from astuner.backbone.trinity.verl_worker import _micro_batches

    if is_bounded:
        monkeypatch.setattr(fsdp, "prepare_micro_batches", _micro_batches)
    model, passes = plain_model(folder), []
    model.get_input_embeddings().register_forward_hook(lambda _module, args, _output: passes.append(args[0].numel()))

    def loss(model_output: Any, data: Any, dp_group: Any) -> tuple[torch.Tensor, dict[str, Any]]:
        pairs = zip(model_output["log_probs"].unbind(), data["loss_mask"].unbind(), strict=True)
        return -torch.stack([(values[:-1] * mask[1:]).sum() for values, mask in pairs]).sum(), {}

    data = rows()
    tensordict_utils.assign_non_tensor(
        data,
        temperature=1.0,
        use_remove_padding=False,
        use_dynamic_bsz=True,
        max_token_len_per_gpu=budget,
    )
    output = make_engine(model).forward_backward_batch(data, loss)
    assert sum(output["metrics"]["computed_tokens"].values) == sum(passes)
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])
    return sum(output["loss"]), gradient, passes, list(output["model_output"]["log_probs"].unbind())


def test_micro_batches_are_bounded_with_their_padding_and_change_no_update(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch.distributed

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        loss, gradient, unbounded, logprobs = updated(model_folder, monkeypatch, BUDGET, is_bounded=False)
        same_loss, same, passes, in_order = updated(model_folder, monkeypatch, BUDGET, is_bounded=True)
    finally:
        torch.distributed.destroy_process_group()
    assert max(unbounded) == len(LENGTHS) * max(LENGTHS)
    assert max(passes) <= BUDGET
    assert passes == [60, 30]
    assert same_loss == pytest.approx(loss, rel=1e-5)
    assert (same - gradient).norm() <= 1e-5 * gradient.norm()
    for row, expected in zip(in_order, logprobs, strict=True):
        # The value of the last token, which is not used, depends on the row after it.
        torch.testing.assert_close(row[:-1], expected[:-1], atol=1e-5, rtol=1e-5)


def test_the_trainer_starts_workers_that_bound_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray
    import verl.workers.engine.fsdp.transformer_impl as fsdp
    from trinity.trainer.trainer import Trainer
    from trinity.trainer.verl import trainer as verl_trainer
    from trinity.trainer.verl.workers import TrinityActorRolloutRefWorker
    from verl.single_controller.base.decorator import MAGIC_ATTR
    from verl.single_controller.ray import RayClassWithInitArgs
    from verl.single_controller.ray.base import create_colocated_worker_cls
    from verl.utils import attention_utils
    from verl.workers.engine import EngineRegistry

    from astuner.backbone.trinity.verl_trainer import WholeBatchTrainer
    from astuner.backbone.trinity.verl_worker import BoundedEngine

    engines = EngineRegistry._engines["language_model"]
    # Restored after the test.
    monkeypatch.setattr(fsdp, "prepare_micro_batches", fsdp.prepare_micro_batches)
    monkeypatch.setattr(attention_utils, "_get_attention_functions", attention_utils._get_attention_functions)
    monkeypatch.setattr(verl_trainer, "TrinityActorRolloutRefWorker", TrinityActorRolloutRefWorker)
    for strategy in ("fsdp", "fsdp2"):
        monkeypatch.setitem(engines, strategy, engines[strategy])
    monkeypatch.setattr(Trainer, "__init__", lambda *_: None)
    WholeBatchTrainer(None)
    worker = verl_trainer.TrinityActorRolloutRefWorker
    of_verl, of_astuner = (
        create_colocated_worker_cls({"actor": RayClassWithInitArgs(cls=ray.remote(each), config={}, role="actor")})
        for each in (TrinityActorRolloutRefWorker, worker)
    )
    methods = [
        {name: getattr(getattr(cls, name), MAGIC_ATTR, None) for name in dir(cls) if name.startswith("actor_")}
        for cls in (each.cls.__ray_actor_class__ for each in (of_verl, of_astuner))
    ]
    assert methods[0] == methods[1]
    assert methods[1]["actor_init_model"] is not None
    monkeypatch.setattr(TrinityActorRolloutRefWorker, "init_model", lambda _: None)
    worker.init_model(object.__new__(worker))
    for strategy in ("fsdp", "fsdp2"):
        assert engines[strategy]["cuda"] is BoundedEngine
