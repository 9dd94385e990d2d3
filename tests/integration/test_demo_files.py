"""The file broker of the demonstration."""

from __future__ import annotations

import multiprocessing
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from kombu import Connection

from testproject.demo.files import register

PROCESSES, EXCHANGES = 4, 40


def _bind(folder: Path, number: int, together: Barrier) -> None:
    options = {"data_folder_in": folder, "data_folder_out": folder, "control_folder": folder}
    with Connection(register(), transport_options=options) as connection:
        channel: Any = connection.default_channel
        for exchange in range(EXCHANGES):
            together.wait(30)
            channel._queue_bind(f"x{exchange}", "key", "", f"q{number}")
        together.wait(30)
        for exchange in range(EXCHANGES):
            assert len(channel.get_table(f"x{exchange}")) == PROCESSES


def test_workers_that_start_together_bind_their_queues(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    together = spawn.Barrier(PROCESSES)
    workers = [
        spawn.Process(target=_bind, args=(tmp_path, number, together), daemon=True)
        for number in range(PROCESSES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0] * PROCESSES
