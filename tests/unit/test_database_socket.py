"""What a driver tells of its socket."""

from __future__ import annotations

import logging
import os
import socket
from types import SimpleNamespace

import pytest

from django_dlock.backends.database.socket_handle import handle_of


def test_g10_a_driver_that_does_not_tell_its_socket_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    class Silent:
        def fileno(self) -> int:
            raise RuntimeError("in use from another thread")

    driver = SimpleNamespace(__name__="unheard_of")
    with caplog.at_level(logging.WARNING, "django_dlock"):
        assert handle_of(Silent(), driver) is None
        assert handle_of(object(), driver) is None
    (record,) = caplog.records
    assert "driver unheard_of have no deadline" in record.getMessage()
    assert "in use from another thread" in record.getMessage()


def test_g10_a_file_that_gets_the_number_of_a_closed_socket_is_left_alone() -> None:
    ours, theirs = socket.socketpair()
    handle = handle_of(ours, socket)
    assert handle is not None
    number, (its_end, end) = ours.fileno(), os.pipe()
    ours.close()
    os.set_blocking(its_end, False)
    os.dup2(end, number)
    try:
        handle.shut_down()
        handle.leave_to_parent()
        assert theirs.recv(1) == b""
        os.write(number, b"x")
        assert os.read(its_end, 1) == b"x"
    finally:
        theirs.close()
        for each in (number, end, its_end):
            os.close(each)
