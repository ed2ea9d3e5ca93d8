"""Starts the Ray instance of a run, or connects to an existing one."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import psutil

from astuner.backbone.ray_cluster.environment import (
    LEAST_CPUS,
    TEMP_DIR_FIX,
    TOKEN_MODE,
    environment_replaced,
    ray_temp_dir,
)
from astuner.backbone.ray_cluster.session_guard import SESSION, session_guard
from astuner.errors import BackboneError, first_line
from astuner.system.localhost import ADDRESS

_START_ATTEMPTS = 3
_KILL_SECONDS = 10.0
_CONNECT_SECONDS = 10.0
# Runs in its own process: if the server is not Ray, the call never returns.
_PROBE = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
# Prints the resources of each node that is alive.
_RESOURCES = """
import json, sys
from ray._raylet import GcsClient
nodes = GcsClient(address=sys.argv[1]).get_all_node_info().values()
print(json.dumps([dict(node.resources_total) for node in nodes if node.state == 0]))
"""
_TOKEN_ERROR = "AuthenticationError"
_GPU_TYPE = "accelerator_type:"
_FIX = (
    "set trainer_common.ray_address to the address of a running Ray instance (`ray start --head`), or leave it out to "
    "start one"
)


def check_not_connected() -> None:
    """Raise BackboneError if this process is connected to a Ray instance."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        raise BackboneError(
            "this process is already connected to a Ray instance; call ray.shutdown() first, or run astuner in another "
            "process and set trainer_common.ray_address to use that instance"
        )


@contextlib.contextmanager
def ray_connected(settings: Mapping[str, Any]) -> Iterator[None]:
    """Start a Ray instance during the block, or connect to an existing one at `address`, which keeps running.

    The processes of an instance that is started here end with this process, even if it is killed. BackboneError:
    Ray cannot be started, or there is none at the address.
    """
    import ray

    settings = {"log_to_driver": False, "logging_level": "ERROR", **settings}
    session: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        if settings.get("address") is None:
            folder = stack.enter_context(ray_temp_dir())
            settings = {"include_dashboard": False, "_node_ip_address": ADDRESS, **settings, "address": "local"}
            settings["_temp_dir"] = folder
            settings["num_cpus"] = settings.get("num_cpus") or max(os.cpu_count() or 1, LEAST_CPUS)
            stack.enter_context(session_guard(folder))
            session[SESSION] = folder
        else:
            settings["address"] = find_ray(settings["address"])
        stack.callback(ray.shutdown)  # safe even if Ray has started only in part
        with environment_replaced(session):
            _init(settings)
        yield


def _init(settings: Mapping[str, Any]) -> None:
    """Call `ray.init`; retry if Ray's own startup timeout of 30 s expired on a busy machine."""
    import ray

    for attempt in range(_START_ATTEMPTS):
        children = {child.pid for child in psutil.Process().children()}
        try:
            with _sigterm_handler_kept(), _unused_processes_omitted(settings), _own_process_groups():
                ray.init(**settings)
            return
        # ray.init raises errors of many types.
        except Exception as error:
            if attempt == _START_ATTEMPTS - 1 or "timed out during startup" not in str(error):
                raise _connection_error(settings["address"], error) from error
            ray.shutdown()  # does not end the processes of a failed start
            for child in psutil.Process().children():
                if child.pid not in children:
                    child.kill()
                    child.wait(_KILL_SECONDS)


@contextlib.contextmanager
def _sigterm_handler_kept() -> Iterator[None]:
    """Prevent Ray from replacing the SIGTERM handler. Ray's handlers end the process before a checkpoint is written.

    One is set in Python. The other is that of Ray's C++ library: it calls Python's, and aborts the process three
    seconds later (https://github.com/ray-project/ray/pull/64830).
    """
    from ray._private import utils

    set_handler, handler = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda _handler: None
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        if handler is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def _unused_processes_omitted(settings: Mapping[str, Any]) -> Iterator[None]:
    """Prevent Ray from starting processes of its head that a run does not use.

    These are the autoscaler and, unless the settings ask for them, the server of the dashboard, which Ray waits for,
    and the process that sends the workers' output to the driver. Together they take 4 seconds of processor time.
    """
    from ray._private.node import Node

    methods = ["start_monitor"]
    methods += ["start_api_server"] * (not settings.get("include_dashboard"))
    methods += ["start_log_monitor"] * (not settings.get("log_to_driver"))
    # Ray has no settings for them. A later version may start them in another way, which does no harm.
    replaced = {name: getattr(Node, name) for name in methods if hasattr(Node, name)}
    for name in replaced:
        setattr(Node, name, lambda self, **_: None)
    try:
        yield
    finally:
        for name, method in replaced.items():
            setattr(Node, name, method)


@contextlib.contextmanager
def _own_process_groups() -> Iterator[None]:
    """Make Ray start its head's processes in their own process groups.

    A terminal or a scheduler may signal the run's whole process group. Ray must not end before a checkpoint is written.
    """
    from ray._private import services

    popen = services.ConsolePopen
    # Where the OS cannot bind Ray's processes to this one, Ray finds them by their process group.
    if sys.platform == "linux":
        services.ConsolePopen = functools.partial(popen, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = popen


def _connection_error(address: str, error: Exception) -> BackboneError:
    if address == "local":
        return BackboneError(
            f"Ray could not be started: {first_line(error)}; if the problem is its temporary folder, {TEMP_DIR_FIX}"
        )
    # Ray reports a version mismatch in several lines, in the cause of the error.
    reason = " ".join(str(error.__cause__ or error).split())
    return BackboneError(
        f"{_cannot_connect(address)}: {reason}. Start its nodes with the Ray and Python versions of this environment, "
        "or leave trainer_common.ray_address out to start a Ray instance for the run"
    )


def _cannot_connect(address: str) -> str:
    return f"could not connect to Ray at {address}"


def find_ray(address: str, timeout: float = 60.0) -> str:
    """Return the `host:port` of a running Ray instance; raise BackboneError if none answers.

    Ray's own connection attempt waits for minutes and reports little, so the address is probed first.
    """
    import ray
    from ray._private.services import canonicalize_bootstrap_address

    resolved: str | None = None
    try:
        resolved = str(canonicalize_bootstrap_address(address))
        host, _, port = resolved.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
    except (OSError, ValueError) as error:  # connection refused or unknown host; not a port
        resolved_to = "" if resolved in (None, address) else f" (resolved to {resolved})"
        raise BackboneError(f"{_cannot_connect(address)}{resolved_to}: {error}; {_FIX}") from error
    failure = _probe(resolved, timeout)
    if failure is not None and _TOKEN_ERROR in failure and _enable_token():
        failure = _probe(resolved, timeout)
    if failure is None:
        return resolved
    if _TOKEN_ERROR in failure:
        raise BackboneError(
            f"{_cannot_connect(address)}: it requires the token it was started with; set RAY_AUTH_TOKEN, or write the "
            "token to ~/.ray/auth_token"
        )
    raise BackboneError(
        f"{_cannot_connect(address)}: the server at {resolved} does not answer like Ray {ray.__version__}; {_FIX}"
    )


def find_gpus(address: str, timeout: float = 60.0) -> list[str]:
    """Return the GPU types in a running Ray instance, without connecting; raise BackboneError if none answers."""
    command = [sys.executable, "-c", _RESOURCES, find_ray(address, timeout)]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    except subprocess.SubprocessError as error:
        raise BackboneError(f"{_cannot_connect(address)}: its resources cannot be read; {_FIX}") from error
    return _gpu_types(json.loads(result.stdout))


def _gpu_types(nodes: Iterable[Mapping[str, float]]) -> list[str]:
    """Return the GPU types among the nodes' resources.

    Ray names the type of the GPUs that a node really has, and not GPUs that a node on a CPU declares (`ray start
    --num-gpus=1`). On nodes without GPUs, it also names the type of other accelerators.
    """
    named = {name for resources in nodes if resources.get("GPU") for name in resources if name.startswith(_GPU_TYPE)}
    return sorted(name.removeprefix(_GPU_TYPE) for name in named)


def check_has_no_gpus(why: str, fix: str) -> None:
    """Raise BackboneError if a node of the connected Ray has GPUs, and `device: auto` has become `cpu`.

    `why` ends a sentence: why the run uses the CPU. `fix` is an imperative: how to train on the GPUs.
    """
    import ray

    types = _gpu_types(node["Resources"] for node in ray.nodes() if node["Alive"])
    if types:
        raise BackboneError(
            f"trainer_common.device is auto, which is the CPU for this run, because {why}; but nodes of the cluster "
            f"have GPUs ({', '.join(types)}). {fix}, or set trainer_common.device=cpu to train on CPUs"
        )


def _probe(address: str, timeout: float) -> str | None:
    """Return None if Ray answers at `host:port`, else the error output."""
    command = [sys.executable, "-c", _PROBE, address]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout:g} s"
    return None if result.returncode == 0 else result.stderr


def _enable_token() -> bool:
    """Make Ray authenticate with the user's token from now on; return whether there is one.

    Ray does this only for the address `auto`, but `ray start` requires a token whenever the user has one.
    """
    from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

    logging.getLogger("ray").setLevel(logging.ERROR)  # hides Ray's advice to disable authentication
    is_set = TOKEN_MODE in os.environ
    return not is_set and maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
