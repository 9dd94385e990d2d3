"""The conditions that the benchmark creates around its servers, and how it measures CPU time."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from benchmarks import parsers, processor
from benchmarks.beds import DelayProxy, spinning

pytestmark = pytest.mark.extended


@pytest.fixture
def echo() -> Iterator[str]:
    """The URL of an echo server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"redis://127.0.0.1:{listener.getsockname()[1]}/0"
        listener.shutdown(socket.SHUT_RDWR)
    thread.join()


def connect(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname, parts.port), timeout=10)


# -- distant --------------------------------------------------------------------------------


def test_a_round_trip_takes_twice_the_delay(echo: str) -> None:
    with DelayProxy(echo) as proxy, connect(proxy.urls[0]) as client:
        proxy.delay(0.2)
        # The proxy may read the new delay only after earlier data was sent.
        for _ in range(2):
            began = time.monotonic()
            client.sendall(b"PING")
            assert client.recv(100) == b"PING"
        assert time.monotonic() - began >= 0.4


def test_a_delay_does_not_reduce_the_throughput(echo: str) -> None:
    chunks = [b"%03d" % number for number in range(40)]
    with DelayProxy(echo) as proxy, connect(proxy.urls[0]) as client:
        proxy.delay(0.5)
        client.sendall(b"---")
        assert client.recv(3) == b"---"
        began = time.monotonic()
        for chunk in chunks:
            client.sendall(chunk)
            time.sleep(0.005)
        received = b""
        while len(received) < 3 * len(chunks):
            received += client.recv(100)
        # One after another, they would take as many seconds as there are chunks.
        assert time.monotonic() - began < len(chunks) / 2
    assert received == b"".join(chunks)


def test_the_server_learns_that_a_client_has_left(echo: str) -> None:
    with DelayProxy(echo) as proxy, connect(proxy.urls[0]) as client:
        client.sendall(b"PING")
        assert client.recv(100) == b"PING"
        client.shutdown(socket.SHUT_WR)
        # The server closes its side, which arrives through the proxy.
        assert client.recv(100) == b""


# -- busy -----------------------------------------------------------------------------------


def test_spinning_processes_end_with_the_bed() -> None:
    psutil = pytest.importorskip("psutil")
    found: list[Any] = []
    give_up_at = time.monotonic() + 20
    with spinning(2):
        # While a process starts its program, it has no command line.
        while len(found) < 2 and time.monotonic() < give_up_at:
            spinners = psutil.Process().children()
            found = [one for one in spinners if "getppid" in " ".join(one.cmdline())]
        assert len(found) == 2
    assert [one for one in found if one.is_running()] == []


# -- processor time and parsers -------------------------------------------------------------

WORK = "import time\nwhile time.process_time() < 0.2: pass\nprint(time.process_time())\ninput()"


def test_the_measured_processor_time_of_a_process_is_its_own() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as worker:
        assert worker.stdout is not None
        said = float(worker.stdout.readline())
        assert said <= processor.used(worker.pid) < said + 1
        worker.communicate("\n")


ASK = """
import sys
from benchmarks import parsers
parsers.use(sys.argv[1])
from redis.utils import HIREDIS_AVAILABLE
print(HIREDIS_AVAILABLE)
"""


def test_a_process_uses_the_chosen_parser() -> None:
    said = {
        parser: subprocess.run(
            [sys.executable, "-c", ASK, parser], capture_output=True, text=True, check=True
        ).stdout.strip()
        for parser in parsers.PARSERS
    }
    there = str(parsers.hiredis_version() is not None)
    assert said == {parsers.PYTHON: "False", parsers.HIREDIS: there}
