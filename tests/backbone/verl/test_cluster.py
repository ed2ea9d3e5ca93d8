"""The Ray of a run: whose it is, where it listens, and what it leaves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from astuner.errors import BackboneError, ModelError

pytestmark = pytest.mark.verl

CONFIG = {
    "ray_kwargs": {"ray_init": {"num_cpus": 2, "num_gpus": 0, "object_store_memory": 80_000_000}},
    "transfer_queue": {"backend": {"SimpleStorage": {"num_data_storage_units": 1}}},
    "trainer": {"n_gpus_per_node": 1, "nnodes": 1},
}


@pytest.fixture(scope="module")
def own_ray() -> Iterator[None]:
    from astuner.backbone.verl.cluster import environment_prepared, ray_running

    with environment_prepared("cpu", own=True) as environment, ray_running(OmegaConf.create(CONFIG), environment):
        yield


def test_the_environment_is_as_before_afterwards(monkeypatch: pytest.MonkeyPatch):
    from astuner.backbone.verl.cluster import environment_prepared

    monkeypatch.setenv("TORCH_COMPILE_DISABLE", "0")
    before = dict(os.environ)
    with environment_prepared("cpu", own=True) as wanted:
        assert wanted["TORCH_COMPILE_DISABLE"] == "0"
        assert wanted["VERL_PLATFORM"] == os.environ["VERL_PLATFORM"] == "cpu"
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert dict(os.environ) == before


LISTENING = f"""
import psutil
from omegaconf import OmegaConf
from astuner.backbone.verl.cluster import environment_prepared, ray_running
with environment_prepared("cpu", own=True) as environment, ray_running(OmegaConf.create({CONFIG}), environment):
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        for place in process.net_connections():
            if place.status == psutil.CONN_LISTEN:
                print(place.laddr.ip.removeprefix("::ffff:"))
"""


def test_a_ray_of_its_own_listens_on_this_machine_only():
    # In a new process: ray reads its environment when it is imported.
    command = [sys.executable, "-c", LISTENING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    addresses = done.stdout.split()
    assert len(addresses) > 5
    assert set(addresses) == {"127.0.0.1"}


def test_a_ray_that_is_there_is_left_alone(own_ray: None):
    import ray

    from astuner.backbone.verl.cluster import ray_running

    with pytest.raises(BackboneError, match=r"connected to a Ray already"), ray_running(OmegaConf.create(CONFIG), {}):
        pass
    assert ray.is_initialized()
    assert ray.cluster_resources()["CPU"] == 2


def test_a_ray_without_room_is_named_with_what_it_lacks(own_ray: None):
    from astuner.backbone.verl.cluster import refuse_small_ray

    expected = r"take 6 CPUs and 1 GPUs, 1 on each of 1 machines; of 2 CPUs and 0 GPUs Ray has 2 CPUs and 0 GPUs left"
    with pytest.raises(BackboneError, match=expected):
        refuse_small_ray(OmegaConf.create(CONFIG), patience=0.5)


OTHER_RUN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="ERROR")
queue = ray.remote(num_cpus=0)(type("Queue", (), {})).options(
    name="TransferQueueController", namespace="transfer_queue"
).remote()
ray.get(queue.__ray_ready__.remote())
print("there", flush=True)
sys.stdin.read()
"""


def test_another_run_in_the_same_ray_is_refused_even_if_it_was_faster(own_ray: None):
    import ray

    from astuner.backbone.verl.trainer import _refuse_another_run

    address = ray.get_runtime_context().gcs_address
    other = subprocess.Popen(
        [sys.executable, "-c", OTHER_RUN, address], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdin is not None
    assert other.stdout is not None
    with other, other.stdin, other.stdout:
        assert other.stdout.readline() == "there\n"
        for own in (False, True):
            with pytest.raises(BackboneError, match=r"another run computes on this Ray"):
                _refuse_another_run(own=own)
        other.stdin.close()
        other.wait(60)
    _refuse_another_run()
    queue = ray.remote(num_cpus=0)(type("Queue", (), {}))
    queue = queue.options(name="TransferQueueController", namespace="transfer_queue").remote()
    ray.get(queue.__ray_ready__.remote())
    _refuse_another_run(own=True)
    ray.kill(queue)


def test_an_engine_whose_process_died_in_a_living_actor_is_named(own_ray: None):
    import ray

    from astuner.backbone.verl.engine_health import refuse_lost_engines

    class VllmServer:
        """What is asked of verl's server: an engine that knows whether its process lives."""

        def __init__(self, errored: bool | None) -> None:
            if errored is not None:
                self.engine = SimpleNamespace(errored=errored)

        async def generate(self) -> None:
            """Make it an actor with an event loop, as verl's is."""

    server = ray.remote(VllmServer).options(num_cpus=0)
    well, further_node, dead = server.remote(False), server.remote(None), server.remote(True)
    refuse_lost_engines([well, further_node])
    expected = (
        r"^rollout engine 2 of 2 is gone: vLLM's engine process \(EngineCore\) has ended.* from the last checkpoint$"
    )
    with pytest.raises(ModelError, match=expected):
        refuse_lost_engines([well, dead])
    ray.kill(well)
    with pytest.raises(ModelError, match=r"^rollout engine 1 of 2 is gone: "):
        refuse_lost_engines([well, dead])
