"""Starting a Ray, and connecting to addresses at which there is none."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from astuner.backbone.ray_cluster.connection import _gpu_types, check_has_no_gpus, find_gpus, find_ray, ray_connected
from astuner.backbone.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
from astuner.backbone.ray_cluster.session_guard import SESSION
from astuner.config.root import RunConfig
from astuner.errors import BackboneError
from astuner.system.localhost import free_port
from astuner.system.process_tree import environment_variable
from astuner.system.signals import Terminated, terminate_on
from tests.backbone.runs import PATIENCE
from tests.launcher.liveness import running_after


@pytest.mark.verl
def test_timed_out_start_is_cleaned_up_and_retried(monkeypatch: pytest.MonkeyPatch):
    import ray

    started: list[subprocess.Popen[bytes]] = []

    def times_out_once(**settings: Any) -> None:
        started.append(subprocess.Popen(["sleep", "600"]))
        if len(started) == 1:
            raise RuntimeError("The current node timed out during startup.")

    monkeypatch.setattr(ray, "init", times_out_once)
    with ray_connected({}):
        first, second = started
        assert not psutil.pid_exists(first.pid)
        first.wait()
        assert second.poll() is None
    second.kill()
    second.wait()


@pytest.mark.verl
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere, Ray finds its processes by their group")
def test_a_signal_to_the_process_group_of_a_run_does_not_reach_its_ray():
    with environment_set(OWN_ENVIRONMENT), ray_connected({"num_gpus": 1}):
        children = psutil.Process().children(recursive=True)
        assert {"gcs_server", "raylet"} <= {child.name() for child in children}
        assert [child for child in children if os.getpgid(child.pid) == os.getpgrp()] == []


@pytest.mark.verl
def test_a_cluster_with_gpus_is_not_used_by_the_cpu_of_device_auto():
    with environment_set(OWN_ENVIRONMENT), ray_connected({"num_gpus": 1}):
        check_has_no_gpus("of a test", "Wait")  # a declared GPU has no type
        assert find_gpus(gcs_address()) == []
    with (
        environment_set(OWN_ENVIRONMENT),
        ray_connected({"num_gpus": 1, "resources": {"accelerator_type:H100": 1.0}}),
    ):
        assert find_gpus(gcs_address()) == ["H100"]
        with pytest.raises(BackboneError, match=r"auto.*because of a test.*GPUs \(H100\)\. Wait, or set .*=cpu"):
            check_has_no_gpus("of a test", "Wait")


def test_other_accelerators_and_declared_gpus_are_not_gpus():
    tpu, declared, gpu = {"accelerator_type:TPU-V4": 1.0}, {"GPU": 1.0}, {"GPU": 2.0, "accelerator_type:H100": 1.0}
    assert _gpu_types([tpu, declared, gpu]) == ["H100"]
    assert _gpu_types([tpu, declared]) == []


def gcs_address() -> str:
    import ray

    return str(ray.get_runtime_context().gcs_address)


@pytest.mark.verl
def test_ray_does_not_abort_a_run_that_is_terminated():
    with (
        terminate_on(signal.SIGTERM),
        environment_set(OWN_ENVIRONMENT),
        ray_connected({"num_cpus": 1}),
    ):
        with pytest.raises(Terminated):
            signal.raise_signal(signal.SIGTERM)
        # The handler of Ray's C++ library has the process aborted by an alarm after three seconds.
        assert signal.alarm(0) == 0


CONNECTED = """
import time
from astuner.backbone.ray_cluster.connection import ray_connected
from astuner.backbone.ray_cluster.environment import OWN_ENVIRONMENT, environment_set
with environment_set(OWN_ENVIRONMENT), ray_connected({}):
    print("connected", flush=True)
    time.sleep(600)
"""


@pytest.mark.verl
def test_a_killed_run_leaves_no_agent_that_does_not_react():
    with subprocess.Popen([sys.executable, "-c", CONNECTED], stdout=subprocess.PIPE, start_new_session=True) as run:
        try:
            assert run.stdout is not None
            assert run.stdout.readline() == b"connected\n"
            started = psutil.Process(run.pid).children(recursive=True)
            (folder,) = {environment_variable(process, SESSION) for process in started} - {""}
            until = time.monotonic() + PATIENCE
            while not (agents := [process for process in started if "Agent" in process.name()]):
                assert time.monotonic() < until, started
                started = psutil.Process(run.pid).children(recursive=True)
            agents[0].suspend()
            time.sleep(1.0)  # the guard has seen the agent
        finally:
            run.kill()
    assert not running_after(started, PATIENCE)
    until = time.monotonic() + PATIENCE
    while Path(folder).exists():
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.parametrize("address", ["local", "ray://10.0.0.1:10001", "10.0.0.1", "head:port", ":6379", ""])
def test_invalid_address_is_a_configuration_error(address: str):
    with pytest.raises(ValueError, match=r"expected host:port of a Ray cluster's head, such as 10\.0\.0\.1:6379, or"):
        RunConfig.model_validate({"astuner": {"trainer_common": {"ray_address": address}}})


@pytest.mark.verl
@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("127.0.0.2:{port}", "Connection refused"),
        ("no-such-host.invalid:{port}", "Name or service not known"),
    ],
)
def test_no_server_at_the_address(address: str, reason: str):
    address = address.format(port=free_port())
    with pytest.raises(BackboneError) as raised:
        find_ray(address)
    message = str(raised.value)
    assert message.startswith(f"could not connect to Ray at {address}: ")
    assert reason in message
    assert message.endswith(
        "set trainer_common.ray_address to the address of a running Ray instance (`ray start --head`), or leave it out "
        "to start "
        "one"
    )


@pytest.mark.verl
def test_another_server_at_the_address():
    # Ray replaces 127.0.0.1 by the network address.
    with socket.create_server(("127.0.0.2", 0)) as server:
        address = f"127.0.0.2:{server.getsockname()[1]}"
        with pytest.raises(
            BackboneError,
            match=r"the server at \S+ does not answer like Ray 2\.\d+\.\d+; set trainer_common\.ray_address",
        ):
            find_ray(address, timeout=5)
