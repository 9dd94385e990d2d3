"""The demonstration ends when it is told to, wherever the signal finds it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

IN_A_FINALIZER = """
import signal
from testproject.demo import interrupt

class Finalized:
    def __del__(self):
        signal.raise_signal(signal.SIGTERM)
        for _ in range(10):
            pass

interrupt.listen()
Finalized()
print("goes on")
try:
    interrupt.pause(0.0)
except KeyboardInterrupt:
    print("stopped")
"""


def test_a_signal_during_a_finalizer_is_not_lost() -> None:
    command = (sys.executable, "-c", IN_A_FINALIZER)
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Exception ignored" in run.stderr
    assert run.stdout.split("\n") == ["goes on", "stopped", ""]
