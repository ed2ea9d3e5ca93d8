"""What verl's workers hold in the memory of their GPU: entropies, adapters' weights, and engines during checkpoints."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loguru import logger
from omegaconf import OmegaConf

from astuner.backbone.ray_cluster.nodes import ActorLostError
from astuner.config.root import AstunerConfig
from astuner.model_tuner.chat_options import CallSettings
from astuner.schema import Task
from astuner.task_rollout.rollout import BatchRequest

pytestmark = pytest.mark.verl


@pytest.fixture
def external_lib(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the module as a worker on a CPU does."""
    from astuner.backbone.verl.cluster import verl_environment

    with verl_environment("cpu", own_ray=False):
        from astuner.backbone.verl import external_lib

    monkeypatch.setattr(external_lib, "get_device_id", lambda: "cpu")
    return external_lib


def test_entropies_have_no_gradient_and_keep_no_logits(monkeypatch: pytest.MonkeyPatch, external_lib: Any):
    from astuner.backbone.verl.actor_worker import disable_entropy_gradient

    functions = external_lib.fsdp.verl_F
    for name in ("entropy_from_logits", "entropy_from_logits_with_chunking"):
        monkeypatch.setattr(functions, name, getattr(functions, name))
    logits = torch.randn(3, 5, 11, generator=torch.Generator().manual_seed(0)).requires_grad_()
    expected = torch.distributions.Categorical(logits=logits).entropy()
    saved: list[torch.Tensor] = []
    keep = torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    )
    with keep:
        assert functions.entropy_from_logits(logits).requires_grad
    assert saved
    saved.clear()
    disable_entropy_gradient()
    with keep:
        entropies = functions.entropy_from_logits(logits)
        chunked = functions.entropy_from_logits_with_chunking(logits.flatten(end_dim=1), chunk_size=4)
    assert saved == []
    assert not entropies.requires_grad
    torch.testing.assert_close(entropies, expected.detach())
    torch.testing.assert_close(chunked, expected.detach().flatten())
    assert functions.entropy_from_logits(logits.detach().bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_entropies_have_a_gradient_only_with_a_bonus(
    external_lib: Any, monkeypatch: pytest.MonkeyPatch, coefficient: float
):
    from astuner.backbone.verl.actor_worker import ActorRolloutRefWorker, ActorWorker

    functions = external_lib.fsdp.verl_F
    for name in ("entropy_from_logits", "entropy_from_logits_with_chunking"):
        monkeypatch.setattr(functions, name, getattr(functions, name))
    monkeypatch.setattr(ActorRolloutRefWorker, "__init__", lambda self, config, role: None)
    ActorWorker(OmegaConf.create({"actor": {"entropy_coeff": coefficient}}), role="actor")
    assert functions.entropy_from_logits(torch.zeros(2, 3, requires_grad=True)).requires_grad is (coefficient > 0)


class Engine:
    """What `_merged_weights` uses of verl's engine; `calls` records the offload and the weights in order."""

    _autocast_dtype = torch.float32

    def __init__(self, *, offload: bool) -> None:
        self._is_offload_param = offload
        self.model_config = SimpleNamespace(lora_alpha=8, lora_rank=2)
        prefix = "base_model.model.layer"
        state = {
            f"{prefix}.base_layer.weight": torch.ones(3, 3),
            f"{prefix}.lora_A.default.weight": torch.ones(2, 3),
            f"{prefix}.lora_B.default.weight": torch.ones(3, 2),
            "base_model.model.norm.weight": torch.ones(3),
        }
        self.module = SimpleNamespace(state_dict=lambda: state)


@pytest.mark.parametrize("stop_after", [1, None], ids=["an interrupted reader", "all weights"])
def test_adapters_weights_are_offloaded_after_they_are_read(
    external_lib: Any, monkeypatch: pytest.MonkeyPatch, stop_after: int | None
):
    calls: list[str] = []
    monkeypatch.setattr(external_lib.fsdp, "offload_fsdp_model_to_cpu", lambda module: calls.append("offload"))
    for offload in (True, False):
        calls.clear()
        weights: Any = external_lib._merged_weights(Engine(offload=offload))
        for number, (name, tensor) in enumerate(weights, 1):
            calls.append(name)
            assert tensor.flatten()[0] == (1 + 4 * 2 if name == "layer.weight" else 1)
            if number == stop_after:
                break
        weights.close()
        read = ["layer.weight", "norm.weight"][:stop_after]
        assert calls == ([*read, "offload"] if offload else read)


class Calls:
    """Stands for verl's groups of workers, engines and episode workers, and records what is called, in order."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.interrupted = False
        self.policy_version = 0
        self.world_size = 1

    def __getattr__(self, name: str) -> Any:
        def called(*args: object, **kwargs: object) -> Any:
            self.names.append(name)
            for value in args:
                if name in ("save_checkpoint", "save_model") and isinstance(value, str):
                    Path(value).mkdir(parents=True, exist_ok=True)
            return []

        return called


def test_engines_sleep_while_checkpoints_are_saved_and_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl.session import VerlCheckpoints, VerlSession
    from astuner.backbone.verl.trainer import VerlTrainer

    calls = Calls()
    trainer: Any = object.__new__(VerlTrainer)
    trainer.engines_awake = False
    trainer.actor_rollout_wg = trainer.checkpoint_manager = calls
    trainer.llm_server_manager = SimpleNamespace(get_replicas=list, global_load_balancer=None)
    session: Any = object.__new__(VerlSession)
    run_inputs = SimpleNamespace(
        codec=SimpleNamespace(save=lambda folder: None), tokenizer=SimpleNamespace(encode=lambda *_, **__: [1])
    )
    session.context = SimpleNamespace(run_inputs=run_inputs)
    session.trainer, session.hosts, session.dtype, session._is_synced = trainer, calls, torch.float32, True
    session._checkpoints, session._certificate, session._config = VerlCheckpoints(tmp_path, 2), None, AstunerConfig()
    monkeypatch.setattr("astuner.backbone.verl.session.certify_sync", lambda *_: None)
    monkeypatch.setattr("astuner.backbone.verl.session.check_router_alive", lambda _: None)

    def taken() -> list[str]:
        names, calls.names = calls.names, []
        return names

    session.sync(1)
    assert taken() == ["update_weights"]  # the engines sleep from their start
    session.save(1, {})
    assert taken() == ["sleep_replicas", "save_checkpoint", "save_model"]
    session.roll_out(None, None, None)
    assert taken() == ["update_weights", "run"]
    assert calls.policy_version == 1
    session.roll_out(None, None, None)
    assert taken() == ["run"]
    session.load()
    assert taken() == ["sleep_replicas", "load_checkpoint"]
    session.save_model(tmp_path / "model", 1)
    assert taken() == ["save_model"]
    session.sync(2)
    session.sync(2)
    assert taken() == ["update_weights", "sleep_replicas", "update_weights"]
    calls.interrupted = True  # requests of the interrupted rollout may keep the engines busy for minutes
    session.save(2, {})
    assert taken() == ["abort_replicas", "sleep_replicas", "save_checkpoint", "save_model"]
    session.save_model(tmp_path / "model", 2)
    assert taken() == ["save_model"]
    # An engine that does not answer, or has died, delays the checkpoint of an interrupted run at most once.
    monkeypatch.setattr("astuner.backbone.verl.session._STOP_SECONDS", 0.2)
    for stopped in (lambda **_: threading.Event().wait(600), raise_ray_error):
        trainer.engines_awake = True
        with monkeypatch.context() as patched:
            patched.setattr(calls, "abort_replicas", stopped, raising=False)
            session.save(3, {})
        assert taken() == ["save_checkpoint", "save_model"]


def raise_ray_error(**_: object) -> None:
    from ray.exceptions import RayActorError

    raise RayActorError


def test_workers_of_an_interrupted_batch_are_neither_missed_nor_started_again(monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl.episode_hosts import EpisodeHosts

    pool: Any = EpisodeHosts(None, None, None)  # type: ignore[arg-type]
    pool.job = SimpleNamespace(config=AstunerConfig())
    pool._actors = [SimpleNamespace(run=None)]

    def killed(*args: object) -> None:
        with pytest.raises(KeyboardInterrupt), pool._closed_after_errors():
            raise KeyboardInterrupt
        raise ActorLostError("killed")

    def started(index: int) -> None:
        raise AssertionError("a worker was started again")

    monkeypatch.setattr("astuner.backbone.verl.episode_hosts.ray.kill", lambda actor: None)
    monkeypatch.setattr("astuner.backbone.verl.episode_hosts.actor_stream", killed)
    monkeypatch.setattr(pool, "_start_actor", started)
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    warnings: list[str] = []
    sink = logger.add(warnings.append, level="WARNING")
    pool._share_thread(0, BatchRequest([Task("t", "?")], 1, "train", 1, 0, CallSettings()), results)
    logger.remove(sink)
    assert warnings == []
    assert "the run was interrupted" in str(results.get_nowait())
    assert pool.interrupted
