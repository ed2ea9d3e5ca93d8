"""The rows that verl's engine computes together, and how many tokens that takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from astuner.algorithms.registry import resolve
from astuner.config.trainer import PackMode
from tests.backbone.published_steps import plain_model, published_step

pytestmark = pytest.mark.verl


class TokenCounts:
    """Counts the tokens of each forward pass of a model."""

    def __init__(self, model: Any) -> None:
        self.of_passes: list[int] = []
        model.get_input_embeddings().register_forward_hook(
            lambda _module, args, _output: self.of_passes.append(args[0].numel())
        )


def updated(
    folder: Path, *, remove_padding: bool, pack: PackMode, token_budget: int
) -> tuple[dict[str, float], torch.Tensor, list[int]]:
    """Return the metrics and the gradient of a training step, and the number of tokens of each forward pass."""
    from astuner.backbone.verl.loss import row_loss
    from astuner.backbone.verl.update import VerlUpdate
    from tests.backbone.verl.in_process import InProcessTrainer, cpu_process_group

    step, model = published_step("grpo", folder), plain_model(folder)
    config = step.config()
    loss = row_loss(config, torch.float32, other_engine=False)
    counts = TokenCounts(model)
    trainer = InProcessTrainer(model, loss, remove_padding=remove_padding, pack=pack, token_budget=token_budget)
    update = VerlUpdate(config, resolve(config.trainer_common.algorithm), trainer, torch.float32, 1, pad_token=0)
    update._check_logprob_gap = lambda *_: None  # type: ignore[method-assign]
    with cpu_process_group():
        metrics = update.step(step.episodes, 1).metrics
    return dict(metrics), trainer.worker.gradient, counts.of_passes


def test_each_distinct_prefix_is_computed_once(model_folder: Path) -> None:
    padded, gradient, padded_passes = updated(model_folder, remove_padding=False, pack="auto", token_budget=1000)
    metrics: dict[str, dict[str, float]] = {"padded": padded}
    passes = {"padded": padded_passes}
    for pack in ("leaf", "tree"):
        metrics[pack], same, passes[pack] = updated(model_folder, remove_padding=True, pack=pack, token_budget=1000)
        assert (same - gradient).norm() <= 1e-5 * gradient.norm()
        assert metrics[pack]["loss/total"] == pytest.approx(padded["loss/total"], rel=1e-5)
    waste = {name: values["update/computed_per_distinct_token"] for name, values in metrics.items()}
    assert waste["tree"] == 1 < waste["leaf"] < waste["padded"]
    assert sum(passes["tree"]) < sum(passes["leaf"]) < sum(passes["padded"])
    for name, counted in passes.items():
        assert waste[name] == pytest.approx(sum(counted) / sum(passes["tree"]))


@pytest.mark.parametrize(("remove_padding", "pack"), [(False, "auto"), (True, "leaf"), (True, "tree")])
def test_micro_batches_are_bounded_by_the_tokens_that_they_compute(
    model_folder: Path, remove_padding: bool, pack: PackMode
) -> None:
    from astuner.backbone.verl.loss import row_loss
    from astuner.config.root import AstunerConfig
    from tests.backbone.verl.in_process import InProcessTrainer, cpu_process_group

    model = plain_model(model_folder)
    loss = row_loss(AstunerConfig(), torch.float32, other_engine=False)
    counts = TokenCounts(model)
    trainer = InProcessTrainer(model, loss, remove_padding=remove_padding, pack=pack, token_budget=48)
    # Together 45 tokens, which verl would pad to 6 × 30.
    sequences = [(list(range(1, 31)), 5), *[([first, 2, 3], 1) for first in range(1, 6)]]
    with cpu_process_group():
        together = trainer.score("together", sequences)
        passes = list(counts.of_passes)
        alone = [trainer.score(f"alone-{number}", [sequence])[0] for number, sequence in enumerate(sequences)]
    assert max(passes) <= 48
    assert sum(passes) == {"padded": 45, "leaf": 45, "tree": 42}[pack if remove_padding else "padded"]
    for values, expected in zip(together, alone, strict=True):
        torch.testing.assert_close(values, expected, atol=1e-5, rtol=1e-5)


def test_verl_uses_the_engine() -> None:
    from verl.workers.engine import EngineRegistry

    import astuner.backbone.verl.external_lib  # noqa: F401
    from astuner.backbone.verl.training_engine import TrainingEngine

    for strategy in ("fsdp", "fsdp2"):
        assert EngineRegistry._engines["language_model"][strategy]["cuda"] is TrainingEngine
