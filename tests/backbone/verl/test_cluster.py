"""The Ray of a run: its environment, its addresses, its resources and conflicts with other runs."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from astuner.config.services import ServiceConfig
from astuner.errors import BackboneError, ModelError
from tests.backbone.verl.plans import run_config

pytestmark = pytest.mark.verl

CONFIG = {
    "ray_kwargs": {"ray_init": {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80_000_000}},
    "transfer_queue": {},
    "trainer": {"n_gpus_per_node": 1, "nnodes": 1},
}


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    from astuner.backbone.verl.cluster import ray_running, verl_environment

    with verl_environment("cpu", own_ray=True) as environment, ray_running(OmegaConf.create(CONFIG), environment):
        yield


def test_the_environment_is_restored(monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl.cluster import verl_environment

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    before = dict(os.environ)
    with verl_environment("cpu", own_ray=True) as environment:
        assert environment["TORCH_COMPILE_DISABLE"] == "0"
        assert environment["VERL_PLATFORM"] == os.environ["VERL_PLATFORM"] == "cpu"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert dict(os.environ) == before


LISTENING = f"""
import psutil
from omegaconf import OmegaConf
from astuner.backbone.verl.cluster import verl_environment, ray_running
with verl_environment("cpu", own_ray=True) as environment, ray_running(OmegaConf.create({CONFIG}), environment):
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for connection in process.net_connections():
            if connection.status == psutil.CONN_LISTEN:
                print(connection.laddr.ip.removeprefix("::ffff:"))
"""


def test_an_own_ray_listens_on_this_machine_only():
    # In a new process: ray reads its environment when it is imported.
    command = [sys.executable, "-c", LISTENING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    addresses = done.stdout.split()
    assert len(addresses) > 5
    assert set(addresses) == {"127.0.0.1"}


def test_an_existing_connection_is_left_alone(own_ray: None):
    import ray

    from astuner.backbone.verl.cluster import ray_running

    with pytest.raises(BackboneError, match="already connected to a Ray"), ray_running(OmegaConf.create(CONFIG), {}):
        pass
    assert ray.is_initialized()
    assert ray.cluster_resources()["CPU"] == 2


def test_missing_resources_are_reported(own_ray: None):
    from astuner.backbone.verl.cluster import check_ray_resources

    expected = r"need 3 CPUs and 1 GPUs, 1 on each of 1 machines; Ray has 2 CPUs and 0 GPUs free of 2 CPUs and 0 GPUs"
    with pytest.raises(BackboneError, match=expected):
        check_ray_resources(OmegaConf.create(CONFIG), timeout=0.5)


OTHER_RUN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
queue = ray.remote(num_cpus=0)(type("Queue", (), {})).options(
    name="TransferQueueController", namespace="transfer_queue"
).remote()
ray.get(queue.__ray_ready__.remote())
print("ready", flush=True)
sys.stdin.read()
"""


def test_another_run_on_the_same_ray_is_rejected_even_if_it_was_faster(own_ray: None):
    import ray

    from astuner.backbone.verl.cluster import check_single_run

    address = ray.get_runtime_context().gcs_address
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other, other.stdin, other.stdout:
        assert other.stdout.readline() == "ready\n"
        for own_queue in (False, True):
            with pytest.raises(BackboneError, match=r"another run is using this Ray instance"):
                check_single_run(own_queue=own_queue)
        other.stdin.close()
        other.wait(60)
    check_single_run()
    queue = ray.remote(num_cpus=0)(type("Queue", (), {}))
    queue = queue.options(name="TransferQueueController", namespace="transfer_queue").remote()
    ray.get(queue.__ray_ready__.remote())
    check_single_run(own_queue=True)
    ray.kill(queue)


def test_a_dead_engine_process_in_a_living_actor_is_reported(own_ray: None):
    import ray

    from astuner.backbone.verl.rollout_engine import check_engines_alive

    class VllmServer:
        """The part of verl's server that is used: an engine with the attribute `errored`."""

        def __init__(self, errored: bool | None) -> None:
            if errored is not None:
                self.engine = SimpleNamespace(errored=errored)

        async def generate(self) -> None:
            """Make this an asyncio actor, like verl's."""

    server = ray.remote(VllmServer).options(num_cpus=0)
    healthy, further_node, dead = server.remote(False), server.remote(None), server.remote(True)
    check_engines_alive([healthy, further_node])
    expected = r"^rollout engine 2 of 2 failed: vLLM's engine process \(EngineCore\) died.* from the last checkpoint$"
    with pytest.raises(ModelError, match=expected):
        check_engines_alive([healthy, dead])
    ray.kill(healthy)
    with contextlib.suppress(ray.exceptions.RayActorError):  # `kill` does not wait for its end
        for _ in range(10_000):
            ray.get(healthy.generate.remote(), timeout=120)
    with pytest.raises(ModelError, match=r"^rollout engine 1 of 2 failed: "):
        check_engines_alive([healthy, dead])


def test_a_dead_router_is_reported(own_ray: None):
    import ray

    from astuner.backbone.verl.rollout_engine import check_router_alive

    router = ray.remote(type("Router", (), {})).options(num_cpus=0).remote()
    check_router_alive(router)
    ray.kill(router)
    with contextlib.suppress(ray.exceptions.RayActorError):  # `kill` does not wait for its end
        for _ in range(10_000):
            ray.get(router.__ray_ready__.remote(), timeout=120)
    with pytest.raises(ModelError, match=r"^the router of requests to the rollout engines failed: .* from the last "):
        check_router_alive(router)


@pytest.mark.parametrize(
    ("device", "here", "cluster", "expected"),
    [
        ("auto", False, ["H100"], "cuda"),
        ("auto", False, [], "cpu"),
        ("auto", True, [], "cuda"),
        ("cuda", False, ["H100"], "cuda"),
        ("cpu", False, ["H100"], "cpu"),
        ("cuda", False, [], r"neither this machine nor a node of the Ray cluster at 10\.0\.0\.1:6379 has a GPU"),
    ],
)
def test_workers_use_the_gpus_of_the_cluster_that_the_run_joins(
    monkeypatch: pytest.MonkeyPatch, device: str, here: bool, cluster: list[str], expected: str
):
    from astuner.backbone.verl import backbone

    monkeypatch.setattr(torch.cuda, "is_available", lambda: here)
    monkeypatch.setattr(backbone, "find_gpus", lambda address: cluster)
    common = run_config(trainer_common__device=device, trainer_common__ray_address="10.0.0.1:6379").astuner
    if expected in ("cpu", "cuda"):
        assert backbone.workers_device(common.trainer_common) == torch.device(expected)
    else:
        with pytest.raises(BackboneError, match=expected):
            backbone.workers_device(common.trainer_common)
    own = run_config(trainer_common__device="auto").astuner.trainer_common
    assert backbone.workers_device(own) == torch.device("cuda" if here else "cpu")


def test_the_ray_of_a_service_is_not_asked_before_it_is_started(monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl import backbone

    def no_answer(address: str) -> list[str]:
        raise BackboneError("Ray does not answer")

    monkeypatch.setattr(backbone, "find_gpus", no_answer)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for device, expected in (("auto", "cpu"), ("cuda", "cuda"), ("cpu", "cpu")):
        config = run_config(trainer_common__device=device, trainer_common__ray_address="127.0.0.1:6380").astuner
        service = {"ray": ServiceConfig(command=["ray", "start", "--head", "--port=6380", "--block"])}
        assert backbone._configured_device(config.model_copy(update={"services": service})) == torch.device(expected)
