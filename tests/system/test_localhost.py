"""Servers on 127.0.0.1: ports and accepted requests."""

from __future__ import annotations

import os
import socket

import pytest

from astuner.errors import ServiceError
from astuner.system.localhost import listen, local_hosts, rejection_reason


def test_a_port_in_use_names_its_process():
    with listen(0) as first:
        port = first.getsockname()[1]
        assert first.getsockname()[0] == "127.0.0.1"
        assert first.proto == socket.IPPROTO_TCP  # otherwise, asyncio leaves Nagle's algorithm on
        with pytest.raises(ServiceError, match=rf"port {port} is in use by process {os.getpid()} \(.+\); give another"):
            listen(port)
    with listen(port) as again:
        assert again.getsockname()[1] == port


@pytest.mark.parametrize(
    ("headers", "foreign"),
    [
        ({"host": "127.0.0.1:80"}, False),
        ({"host": "localhost:80", "origin": "http://localhost:80"}, False),
        ({"host": "127.0.0.1:80", "sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate"}, False),
        ({}, True),
        ({"host": "rebound.example:80"}, True),
        ({"host": "127.0.0.1:81"}, True),
        ({"host": "127.0.0.1:80", "origin": "null"}, True),
        ({"host": "127.0.0.1:80", "origin": "http://localhost:80"}, True),
        ({"host": "127.0.0.1:80", "sec-fetch-site": "cross-site", "sec-fetch-mode": "no-cors"}, True),
    ],
)
def test_only_requests_from_this_machine_are_accepted(headers: dict[str, str], foreign: bool):
    assert (rejection_reason(headers, local_hosts(80)) is not None) == foreign
