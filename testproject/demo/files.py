"""Kombu's file broker, corrected so that no worker reads an incomplete file.

Kombu's own class writes a message directly to the file that workers read. A worker that moves the
file at that moment reads an empty message, and stops. The same happens to a worker that starts
while another one creates the file with the bindings of an exchange.
"""

from __future__ import annotations

import fcntl
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, filesystem
from kombu.utils.json import dumps


class Channel(filesystem.Channel):
    """Publishes a file only when it is complete, and reads bindings only when they are."""

    def _put(self, queue: str, message: Any, **_: Any) -> None:  # type: ignore[override]
        name = f"{time.monotonic_ns() // 1_000_000}_{uuid.uuid4()}.{queue}.msg"
        folder = Path(self.data_folder_out)
        unfinished = folder / f"{name}.part"
        unfinished.write_text(dumps(message))
        os.rename(unfinished, folder / name)

    def _queue_bind(self, *binding: Any) -> None:
        with self._bindings_locked():
            super()._queue_bind(*binding)

    def get_table(self, exchange: str) -> list[Any]:
        """The bindings of an exchange."""
        with self._bindings_locked():
            table: list[Any] = super().get_table(exchange)
        return table

    @contextmanager
    def _bindings_locked(self) -> Iterator[None]:
        self.control_folder.mkdir(exist_ok=True)
        with (self.control_folder / "bindings.lock").open("w") as file:
            # Closing the file releases it.
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


class Transport(filesystem.Transport):
    """As kombu's class."""

    Channel = Channel


def register() -> str:
    """Register the transport with kombu; returns the URL of the broker."""
    TRANSPORT_ALIASES["whole-files"] = f"{__name__}:Transport"
    return "whole-files://localhost"
