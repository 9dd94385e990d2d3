"""A Prometheus for the tests, of the installed package."""

from __future__ import annotations

import json
import shutil
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

from testproject.processes import HOST, OwnProcess, ServerNotFound

__all__ = ["PrometheusServer", "ServerNotFound", "promtool"]


def program(name: str) -> str:
    """The path of a program of the package.

    Raises:
        ServerNotFound: It is not installed.
    """
    found = shutil.which(name)
    if found is None:
        raise ServerNotFound(f"no {name}: install the prometheus package")
    return found


def promtool() -> str:
    return program("promtool")


@final
class PrometheusServer(OwnProcess):
    """Reads metrics every half second; a context manager.

    Args:
        targets: Job → address of what is read.
        rules: File of alert rules.
    """

    def __init__(self, targets: dict[str, str], rules: Path) -> None:
        super().__init__("dlock-prometheus-")
        self._targets, self._rules = targets, rules

    def ask(self, what: str, **parameters: str) -> Any:
        query = urllib.parse.urlencode(parameters)
        with urllib.request.urlopen(
            f"http://{HOST}:{self.port}/api/v1/{what}?{query}", timeout=5
        ) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """The values of the series that the expression gives."""
        return [float(each["value"][1]) for each in self.ask("query", query=expression)["result"]]

    def _launch(self) -> None:
        jobs = [
            {"job_name": job, "static_configs": [{"targets": [target]}]}
            for job, target in self._targets.items()
        ]
        # JSON is YAML.
        configuration: dict[str, Any] = {
            "global": {"scrape_interval": "500ms", "evaluation_interval": "500ms"},
            "rule_files": [str(self._rules)],
            "scrape_configs": jobs,
        }
        file = self.directory / "prometheus.yml"
        file.write_text(json.dumps(configuration))
        self._spawn(self._command(program("prometheus"), file))

    def _command(self, path: str, file: Path) -> Sequence[str]:
        return [
            path,
            f"--config.file={file}",
            f"--storage.tsdb.path={self.directory / 'data'}",
            f"--web.listen-address={HOST}:{self.port}",
        ]

    def _answers(self) -> bool:
        try:
            return bool(self.ask("status/runtimeinfo"))
        except (OSError, ValueError):
            return False
