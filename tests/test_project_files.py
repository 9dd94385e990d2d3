"""What code hosts, Read the Docs and pre-commit are told to run exists in the project."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import dropwhile
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import supported
from tests.test_docs import defined_extras

ROOT = Path(__file__).resolve().parent.parent
GITHUB = ROOT / ".github"
FORMS = sorted((GITHUB / "ISSUE_TEMPLATE").glob("*.yml"))

AS_ROOT = ("sudo", "-E", "env", "PATH=$PATH")
"""Words before a command that do not change what it is."""

pytestmark = pytest.mark.project


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def jobs() -> dict[str, Any]:
    found: dict[str, Any] = read(GITHUB / "workflows" / "ci.yml")["jobs"]
    return found


def commands_of_jobs() -> list[str]:
    return [step["run"] for job in jobs().values() for step in job["steps"] if "run" in step]


def commands_of_scripts() -> list[str]:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return [line.partition(" || ")[0] for line in lines if line.startswith(("make ", ".ci/"))]


def commands_of_hooks() -> list[str]:
    repositories = read(ROOT / ".pre-commit-config.yaml")["repos"]
    # Other repositories would have to be fetched, and could differ from what make lint runs.
    assert [each["repo"] for each in repositories] == ["local"]
    return [hook["entry"] for each in repositories for hook in each["hooks"]]


def commands_of_read_the_docs() -> list[str]:
    found: list[str] = read(ROOT / ".readthedocs.yaml")["build"]["commands"]
    return found


ALL = {
    ".github/workflows/ci.yml": commands_of_jobs,
    ".ci/run": commands_of_scripts,
    ".pre-commit-config.yaml": commands_of_hooks,
    ".readthedocs.yaml": commands_of_read_the_docs,
}


def words(command: str) -> Iterator[list[str]]:
    for part in re.split(r"&&|;|\n", command):
        if found := [*dropwhile(AS_ROOT.__contains__, shlex.split(part))]:
            yield found


def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("file", ALL)
def test_the_commands_of_a_file_exist(file: str) -> None:
    commands = [found for command in ALL[file]() for found in words(command)]
    assert commands
    for command in commands:
        match command:
            case ["make", target, *_]:
                assert target in targets()
            case [script] if script.startswith(".ci/"):
                assert (ROOT / script).stat().st_mode & 0o100, f"{script} cannot be executed"
            case ["python", "-m", "pip", "install", *packages]:
                asked = {extra for each in packages for extra in re.findall(r"\w+(?=[],])", each)}
                assert asked <= defined_extras(), command
            case ["python", "-m", "sphinx", *options]:
                assert (ROOT / options[-2] / "conf.py").exists()
                assert options[-1].startswith("$READTHEDOCS_OUTPUT/")
            case ["python", "-m", "tox", "run", "-e", environment]:
                assert environment == "${{ matrix.env }}" or environment.endswith("celerymain")
            case ["apt-get", *_] | ["git", "config", *_]:
                pass
            case _:
                pytest.fail(f"{file} has a command that this test does not know: {command}")


def test_the_environments_of_the_workflow_are_those_of_tox() -> None:
    matrix = jobs()["versions"]["strategy"]["matrix"]["include"]
    tox = (ROOT / "tox.ini").read_text()
    others = re.findall(r"^    (\w+)$", tox.partition("\n\n")[0], re.MULTILINE)
    assert [each["env"] for each in matrix] == supported.environments() + others
    for each in matrix:
        if named := re.match(r"py3(\d+)-", each["env"]):
            assert each["python"] == f"3.{named[1]}"


def test_the_environment_of_development_versions_is_in_tox() -> None:
    (environment,) = re.findall(r"tox run -e (py\S+)", "\n".join(commands_of_jobs()))
    sections = re.findall(
        r"^\[testenv:py\{([\d,]+)\}-(\S+)\]$", (ROOT / "tox.ini").read_text(), re.MULTILINE
    )
    assert environment in {
        f"py{version}-{rest}" for all_, rest in sections for version in all_.split(",")
    }


@pytest.mark.parametrize("form", [form for form in FORMS if form.stem != "config"], ids=str)
def test_an_issue_form_is_complete(form: Path) -> None:
    told = read(form)
    assert {"name", "description", "body"} <= told.keys()
    fields = [field for field in told["body"] if field["type"] != "markdown"]
    assert all(field["attributes"]["label"] for field in fields)
    assert len({field["id"] for field in fields}) == len(fields)
    assert any(field.get("validations", {}).get("required") for field in fields)


def test_a_report_of_a_bug_has_the_diagnosis() -> None:
    from django.core.management import get_commands

    text = (GITHUB / "ISSUE_TEMPLATE" / "bug.yml").read_text()
    (command,) = re.findall(r"python manage.py (\w+)", text)
    assert command in get_commands()
    for page in re.findall(r"docs/[\w/.-]+\.md|[A-Z]+\.md", text):
        assert (ROOT / page).exists()
