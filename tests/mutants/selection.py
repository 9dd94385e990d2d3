"""Chooses the mutants that run: 120, always the same for a commit, of all or of the changed."""

from __future__ import annotations

import os
import random
import re
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from tests.mutants.mutant import BrokenMutant, Mutant
from tests.mutants.node_ids import Suite
from tests.mutants.places import Package

MOST = 120
"""Mutants of one draw."""


def drawn(names: Collection[str], seed: str, most: int = MOST) -> set[str]:
    """At most ``most`` of the names, always the same ones for a ``seed``."""
    return set(random.Random(seed).sample(sorted(names), min(most, len(names))))


def seed_of(tree: Path) -> str:
    """The commit; without a repository, the version."""
    if is_checkout(tree):
        return git(tree, "rev-parse", "HEAD").strip()
    text = (tree / "django_dlock/__init__.py").read_text()
    found = re.search(r'^__version__ = "(.+)"$', text, re.MULTILINE)
    return found[1] if found else ""


def is_checkout(tree: Path) -> bool:
    """Whether ``tree`` is a repository, and not just a folder inside another one."""
    try:
        return Path(git(tree, "rev-parse", "--show-toplevel").strip()) == tree.resolve()
    except FileNotFoundError:
        return False
    except subprocess.CalledProcessError as error:
        # Git may refuse a repository of another user.
        if (tree / ".git").exists():
            raise SystemExit(error.stderr.strip()) from error
        return False


def changed_since(tree: Path, commit: str) -> set[str]:
    """The files that differ from ``commit``, committed or not; a moved file counts as new.

    Raises:
        subprocess.CalledProcessError: There is no such commit; ``stderr`` says it.
    """
    differing = git(tree, "diff", "--name-only", "--no-renames", "-z", commit, "--")
    untracked = git(tree, "ls-files", "--others", "--exclude-standard", "-z")
    return {path for path in (differing + untracked).split("\0") if path}


def near(
    mutants: Sequence[Mutant], changed: Collection[str], package: Package, suite: Suite
) -> list[Mutant]:
    """The mutants that are in a changed file, change one, or have their test in one.

    A broken one is near: it may be broken by what has changed.
    """

    def is_near(mutant: Mutant) -> bool:
        try:
            files = {
                f"tests/mutants/{mutant.name}.mutant",
                *package.changed(mutant),
                *(file for test in suite.of(mutant) for file in test.files),
            }
        except BrokenMutant:
            return True
        return not files.isdisjoint(changed)

    return [mutant for mutant in mutants if is_near(mutant)]


def git(tree: Path, *arguments: str) -> str:
    """The output of git in ``tree``, even if a hook of another repository runs this.

    Raises:
        subprocess.CalledProcessError: Git refused; ``stderr`` says why.
    """
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(
        ["git", *arguments], cwd=tree, env=env, capture_output=True, text=True, check=True
    ).stdout
