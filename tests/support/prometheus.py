"""A Prometheus for the tests, of the installed package."""

from __future__ import annotations

import json
import re
import shutil
import urllib.parse
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import django_dlock
from django_dlock.metrics.instruments import Instrument
from testproject.processes import HOST, OwnProcess, ServerNotFound

__all__ = [
    "ALERTS",
    "DASHBOARD",
    "PrometheusServer",
    "ServerNotFound",
    "collector_name",
    "promtool",
]

FILES = Path(django_dlock.__file__).parent / "metrics" / "monitoring"
ALERTS, DASHBOARD = FILES / "alerts.yml", FILES / "grafana.json"


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


def in_seconds(text: str) -> str:
    """The rules or the query with seconds for minutes, so that a test need not last hours."""
    return re.sub(r"\b(\d+)m\b", r"\1s", text)


def collector_name(instrument: Instrument) -> str:
    """The name that a metric has in Prometheus if OpenTelemetry brings it there.

    By the rules that are documented for the exporters of OpenTelemetry's collector and for the OTLP
    receiver of Prometheus 3, with their defaults; neither program can be had from Debian or PyPI.
    """
    parts = [part for part in re.split(r"[^a-zA-Z0-9:]+", instrument.name) if part]
    # An annotation in braces is not a unit.
    unit = {"s": "seconds", "1": ""}.get(instrument.unit, re.sub(r"\{.*\}", "", instrument.unit))
    if unit and unit not in parts:
        parts.append(unit)
    if instrument.kind == "counter":
        parts = [*(part for part in parts if part != "total"), "total"]
    # A sum that can fall is not a gauge to them.
    if instrument.kind == "gauge" and instrument.unit == "1":
        parts = [*(part for part in parts if part != "ratio"), "ratio"]
    return "_".join(parts)


@final
class PrometheusServer(OwnProcess):
    """Reads metrics every second, and counts seconds for minutes; a context manager.

    Args:
        targets: Job → address of what is read.
        rules: File of alert rules; their durations are shortened.
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
        rules = self.directory / "rules.yml"
        rules.write_text(in_seconds(self._rules.read_text()))
        # JSON is YAML.
        configuration: dict[str, Any] = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "500ms"},
            "rule_files": [str(rules)],
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
            f"--query.lookback-delta={in_seconds('5m')}",
        ]

    def _answers(self) -> bool:
        try:
            return bool(self.ask("status/runtimeinfo"))
        except (OSError, ValueError):
            return False
