"""Addresses at which no Ray can be joined: an error in words, and soon."""

from __future__ import annotations

import socket

import pytest

from astuner.config.root import RunConfig
from astuner.errors import BackboneError
from astuner.ports import free_port


@pytest.mark.parametrize("address", ["local", "ray://10.0.0.1:10001", "10.0.0.1", "head:port", ":6379", ""])
def test_what_is_no_address_is_refused_with_the_configuration(address: str):
    with pytest.raises(ValueError, match=r"expected host:port of a Ray cluster's head, such as 10\.0\.0\.1:6379, or"):
        RunConfig.model_validate({"astuner": {"trainer_common": {"ray_address": address}}})


@pytest.mark.verl
@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.2:{port}", "Connection refused"),
        ("no-such-host.invalid:{port}", "Name or service not known"),
    ],
)
def test_where_nothing_listens(address: str, why: str):
    from astuner.backbone.cluster.joining import found_ray

    address = address.format(port=free_port())
    with pytest.raises(BackboneError) as raised:
        found_ray(address)
    said = str(raised.value)
    assert said.startswith(f"the Ray at {address} could not be joined: ")
    assert why in said
    assert said.endswith(
        "trainer_common.ray_address has to be that of a Ray (`ray start --head`); without it, one is started"
    )


@pytest.mark.verl
def test_where_something_else_listens():
    from astuner.backbone.cluster.joining import found_ray

    # Ray takes 127.0.0.1 for the address of the network.
    with socket.create_server(("127.0.0.2", 0)) as server:
        address = f"127.0.0.2:{server.getsockname()[1]}"
        with pytest.raises(
            BackboneError, match=r"what listens at \S+ does not answer as Ray 2\.\d+\.\d+ does; trainer_common"
        ):
            found_ray(address, patience=5)
