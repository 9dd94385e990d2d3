"""Results as JSON files, and the conditions that numbers depend on besides the code."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

from . import parsers, processor
from .budgets import judge
from .model import Metric, Result, RowResult, Series, SubjectResult

DIRECTORY = Path(__file__).resolve().parent.parent / "build" / "bench"

PACKAGES = (
    "django-dlock",
    "Django",
    "redis",
    "celery",
    "kombu",
    "django-redis",
    "python-redis-lock",
    "pottery",
    "celery-once",
    "celery-singleton",
    "django-pglock",
    "psycopg",
    "redlock-py",
    "kazoo",
    "etcd3gw",
    "urllib3",
)


def environment(redis_url: str, postgres_url: str) -> dict[str, Any]:
    """Versions, the machine, and how the measurement treats the garbage collector."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "cpus": processor.count(),
        "load_at_start": round(os.getloadavg()[0], 2),
        "redis_server": _redis_version(redis_url),
        "postgresql": _postgres_version(postgres_url) if postgres_url else None,
        "packages": {
            **{name: _version(name) for name in PACKAGES},
            "hiredis": parsers.hiredis_version(),
        },
        "gc": "on; collected and frozen before each turn of each subject",
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor()


def _redis_version(url: str) -> str:
    from redis import Redis

    with Redis.from_url(url) as client:
        return str(client.info("server")["redis_version"])


def _postgres_version(url: str) -> str:
    import psycopg

    with psycopg.connect(url) as connection:
        return str(connection.info.parameter_status("server_version"))


# -- files ----------------------------------------------------------------------------------


def write(result: Result, directory: Path = DIRECTORY) -> Path:
    """Store a result under the time of its start; return the path.

    For readers without this code, each series includes its ratio to the floor and the spread of
    that ratio, and the file includes the verdicts. ``read`` computes them again.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{result.started.replace(':', '')}.json"
    data = dataclasses.asdict(result)
    for name, row in result.rows.items():
        for subject, about in data["rows"][name]["subjects"].items():
            for metric, series in about["series"].items():
                series.update(_derived(row, subject, metric))
    data["verdicts"] = [dataclasses.asdict(verdict) for verdict in judge(result.rows.values())]
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    return path


def _derived(row: RowResult, subject: str, metric: str) -> dict[str, Any]:
    compared = row.compared(subject, metric)
    own = row.subjects[subject].series[metric]
    facts: dict[str, Any] = {"spread": dataclasses.asdict(own.spread)}
    if row.metric(metric).floor is not None and compared is not None:
        facts["ratio"] = {
            "spread": dataclasses.asdict(compared.spread),
            "percentiles": compared.percentiles,
        }
    return facts


def read(path: Path) -> Result:
    """Raises ``OSError``, ``ValueError`` or ``KeyError`` if it is not such a file."""
    data = json.loads(path.read_text())
    return Result(
        started=data["started"],
        quick=data["quick"],
        environment=data["environment"],
        rows={name: _row(row) for name, row in data["rows"].items()},
    )


def _row(data: dict[str, Any]) -> RowResult:
    return RowResult(
        name=data["name"],
        title=data["title"],
        metrics=tuple(
            Metric(**{**metric, "percentiles": tuple(metric["percentiles"])})
            for metric in data["metrics"]
        ),
        family=data["family"],
        x=data["x"],
        bed=data.get("bed", "idle"),
        parser=data.get("parser", "python"),
        subjects={
            name: SubjectResult(
                role=about["role"],
                options=about["options"],
                series={
                    metric: Series(series["rounds"], series["percentiles"])
                    for metric, series in about["series"].items()
                },
                cannot=about["cannot"],
            )
            for name, about in data["subjects"].items()
        },
        seconds=data["seconds"],
    )


def latest(count: int, directory: Path = DIRECTORY) -> list[Path]:
    """The newest results, the newest last.

    Raises:
        FileNotFoundError: There are fewer.
    """
    found = sorted(directory.glob("*.json"))
    if len(found) < count:
        raise FileNotFoundError(f"{len(found)} results in {directory}, {count} wanted")
    return found[-count:]


def now() -> str:
    """The time, in the form that file names of results have."""
    return dt.datetime.now(dt.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
