"""A port that is chosen before an engine starts is still free when the server listens on it."""

from __future__ import annotations

import socket

import pytest

from ragserve.engine.ports import LOOPBACK, address, hold_port, port_of
from ragserve.errors import Conflict


def test_a_held_port_is_given_to_nobody_else() -> None:
    with hold_port() as held:
        for _ in range(5_000):
            with socket.socket() as other:
                other.bind((LOOPBACK, 0))
                assert other.getsockname()[1] != port_of(held)


def test_a_held_port_can_be_listened_on_by_its_server() -> None:
    with hold_port() as held, hold_port(port=port_of(held)) as server:
        server.listen()
        with socket.create_connection((LOOPBACK, port_of(held)), timeout=240):
            pass


def test_a_port_that_a_server_listens_on_is_refused() -> None:
    with hold_port() as server:
        server.listen()
        with pytest.raises(Conflict, match="another port with --port") as refused:
            hold_port(port=port_of(server))
    assert refused.value.code == "port_in_use"


def test_an_address_is_that_of_a_url() -> None:
    assert (address("::1", 80), address("10.0.0.5", 80)) == ("[::1]:80", "10.0.0.5:80")
