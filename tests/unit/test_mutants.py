"""Mutants are found by what they change, so that moved code and moved tests break none."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from textwrap import dedent

import pytest

from tests.mutants import __main__ as program
from tests.mutants.from_diff import from_diff
from tests.mutants.mutant import BrokenMutant, Change, Mutant, all_mutants
from tests.mutants.node_ids import Suite
from tests.mutants.places import Package
from tests.mutants.runner import find
from tests.mutants.selection import changed_since, drawn, near, seed_of

pytestmark = pytest.mark.project

ROOT = Path(__file__).resolve().parents[2]

HEAD = """\
Guarantee: G13
Breaks: a callback has a new id each time
Test: test_an_id_stays

"""
CHILD_ID = """\
In: child_id
-    return str(parent)
+    return new_id()
"""
FUNCTION = """\
def child_id(parent):
    return str(parent)
"""


def mutant(sections: str = CHILD_ID, head: str = HEAD) -> Mutant:
    return Mutant.read("g13/fresh", head + sections)


def changed(files: dict[str, str], sections: str = CHILD_ID) -> dict[str, str]:
    return Package(files).changed(mutant(sections))


# -- all of them -----------------------------------------------------------------------


def test_every_mutant_finds_its_place_and_its_tests():
    package, suite = Package.read(ROOT), Suite(ROOT)
    broken = [problem for each in all_mutants() if (problem := problem_of(each, package, suite))]
    assert not broken, "\n\n".join(broken)


def problem_of(each: Mutant, package: Package, suite: Suite) -> str:
    try:
        find(each, package, suite)
    except BrokenMutant as error:
        return str(error)
    return ""


def test_a_mutant_is_in_the_folder_of_its_guarantee():
    for each in all_mutants():
        folder = each.name.rpartition("/")[0]
        assert not folder or folder.upper().replace("G0", "G") == each.guarantee, each.name


# -- places ----------------------------------------------------------------------------


def test_lines_may_move_and_the_function_may_move_to_another_file():
    before = "import os\n\n\n# More.\n"
    after = FUNCTION.replace("str(parent)", "new_id()")
    assert changed({"a.py": FUNCTION}) == {"a.py": after}
    assert changed({"a.py": "import os\n", "b/c.py": before + FUNCTION}) == {
        "b/c.py": before + after
    }


def test_a_function_may_become_a_method():
    files = {
        "a.py": dedent(
            """\
            class Callback:
                def child_id(self, parent):
                    if parent:
                        return str(parent)
            """
        )
    }
    assert changed(files)["a.py"].endswith("        if parent:\n            return new_id()\n")


def test_indentation_counts_between_the_lines_of_a_text():
    section = "In: f\n     if a:\n-        b()\n+    c()\n"
    inside = "def f(a):\n    if a:\n        b()\n"
    beside = "def f(a):\n    if a:\n        pass\n    b()\n"
    with pytest.raises(BrokenMutant, match="nowhere"):
        changed({"a.py": beside}, section)
    in_class = "class A:\n" + "".join(f"    {line}\n" for line in inside.splitlines())
    with pytest.raises(BrokenMutant, match="is not Python"):
        changed({"a.py": in_class}, section)
    section = section.replace("+    c()", "+        c()")
    assert changed({"a.py": in_class}, section) == {"a.py": in_class.replace("b()", "c()")}


def test_a_replacement_may_be_indented_less_than_what_it_replaces():
    section = "In: f\n-        with a:\n-            b()\n+    b()\n"
    text = "def f(a):\n        with a:\n            b()\n"
    assert changed({"a.py": text}, section) == {"a.py": "def f(a):\n    b()\n"}
    with pytest.raises(BrokenMutant, match="no room to the left for b"):
        changed({"a.py": dedent("class f:\n with a:\n     b()\n")}, section)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("Outer.method.inner", "class Outer:\n def method(self):\n  def inner():\n   return 1\n"),
        ("method.inner", "class Outer:\n async def method(self):\n  def inner():\n   return 1\n"),
        ("Outer", "class Outer:\n  @cached\n  def method(self):\n    return 1\n"),
        ("LOWER", "LOWER = '''\nreturn 1\n'''\n"),
        ("Model.LOWER", "class Model:\n  LOWER: str = '''\n  return 1\n  '''\n"),
        ("late", "try:\n  import x\nexcept ImportError:\n  def late():\n    return 1\n"),
        ("module", "'''\nreturn 1\n'''\n"),
    ],
)
def test_a_place_has_the_name_of_a_function_class_or_constant(where, text):
    section = f"In: {where}\n-return 1\n+return 2\n"
    assert changed({"a.py": text}, section) == {"a.py": text.replace("1", "2")}


def test_a_file_that_is_not_python_is_a_place_wherever_it_is():
    files = {"static/old/refresh.js": "f();\n\tg();\n", "a.py": "f();\n"}
    section = "In: refresh.js\n     g();\n+    h();\n"
    assert changed(files, section) == {"static/old/refresh.js": "f();\n\tg();\n\th();\n"}


def test_a_decorator_belongs_to_its_function():
    section = "In: f\n-@once\n def f():\n"
    assert changed({"a.py": "@once\ndef f():\n    pass\n"}, section)["a.py"].startswith("def")


def test_one_of_several_functions_with_a_name_may_have_the_text():
    other = "def child_id():\n    return 0\n"
    assert set(changed({"a.py": FUNCTION, "b.py": other})) == {"a.py"}


def test_a_text_in_two_places_is_an_error_that_names_both():
    with pytest.raises(BrokenMutant) as error:
        changed({"a.py": FUNCTION, "b.py": "\n" + FUNCTION})
    assert str(error.value) == (
        "g13/fresh: In: child_id: this text is in 2 places (a.py:2, b.py:3):\n"
        "    return str(parent)"
    )


def test_a_text_that_is_nowhere_is_an_error_that_says_where_its_function_is():
    with pytest.raises(BrokenMutant) as error:
        changed({"a.py": FUNCTION.replace("str", "repr")})
    assert str(error.value) == (
        "g13/fresh: In: child_id: child_id is in a.py:1, and this text is nowhere:\n"
        "    return str(parent)"
    )


def test_a_text_that_is_elsewhere_is_an_error_that_says_where():
    with pytest.raises(BrokenMutant, match=r"nothing has this name, and .* only in b.py:2"):
        changed({"b.py": FUNCTION.replace("child_id", "id_of_child")})


def test_several_changes_of_a_file_do_not_move_each_other():
    sections = (
        "In: f\n-    a()\n+    b()\n+    c()\n\nIn: f\n-    d()\n\nIn: g\n-    a()\n+    x()\n"
    )
    text = "def f():\n    a()\n\n    d()\n    e()\n\ndef g():\n    a()\n"
    assert changed({"a.py": text}, sections) == {
        "a.py": "def f():\n    b()\n    c()\n\n    e()\n\ndef g():\n    x()\n"
    }
    with pytest.raises(BrokenMutant, match=r"two changes meet in a.py:2"):
        changed({"a.py": text}, "In: f\n-    a()\n+    b()\n\nIn: f\n     a()\n+    c()\n")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (HEAD, "must say"),
        (CHILD_ID, "must say"),
        (HEAD.replace("G13", "G99") + CHILD_ID, "G99 is none of"),
        (HEAD + "In: f\n+    pass\n", "says no text to look for"),
        (HEAD + "In: f\n     pass\n", "changes nothing"),
        (HEAD + "In: f\n-    pass\nreturn\n", "begins with none of"),
    ],
)
def test_a_mutant_that_is_incomplete_is_an_error(text, problem):
    with pytest.raises(BrokenMutant, match=f"g01/x.*{problem}"):
        Mutant.read("g01/x", text)


def test_editors_may_strip_the_sign_of_an_empty_line():
    change = Change.read(" f\n-    a()\n\n     b()\n\n")
    assert change.old == ("    a()", "", "    b()")
    assert change.new == ("", "    b()")


# -- tests -----------------------------------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    write(tmp_path, "django_dlock/__init__.py", '__version__ = "1.2"\n')
    write(tmp_path, "django_dlock/ids.py", FUNCTION)
    write(
        tmp_path,
        "django_dlock/testing/contract.py",
        "class Tools:\n    pass\n\n\nclass Contract(Tools):\n    def test_rule(s): 0\n",
    )
    write(tmp_path, "tests/unit/test_ids.py", "def test_an_id_stays():\n    pass\n")
    for store in ("Redis", "Local"):
        write(
            tmp_path,
            f"tests/backends/test_{store.lower()}.py",
            f"class Test{store}(Contract):\n    async def test_own(self):\n        pass\n",
        )
    return tmp_path


def write(tree: Path, path: str, text: str) -> None:
    (tree / path).parent.mkdir(parents=True, exist_ok=True)
    (tree / path).write_text(text)


def move(tree: Path, old: str, new: str) -> None:
    (tree / new).parent.mkdir(parents=True, exist_ok=True)
    (tree / old).rename(tree / new)


@pytest.mark.parametrize(
    ("name", "node_id"),
    [
        ("test_an_id_stays", "tests/unit/test_ids.py::test_an_id_stays"),
        ("test_an_id_stays[a-b]", "tests/unit/test_ids.py::test_an_id_stays[a-b]"),
        ("test_ids.py", "tests/unit/test_ids.py"),
        ("test_ids.py::test_an_id_stays", "tests/unit/test_ids.py::test_an_id_stays"),
        ("TestRedis::test_rule", "tests/backends/test_redis.py::TestRedis::test_rule"),
        ("test_local.py::test_own", "tests/backends/test_local.py::TestLocal::test_own"),
    ],
)
def test_a_test_is_found_by_its_name(tree, name, node_id):
    assert Suite(tree).find(name).node_id == node_id


def test_a_test_may_move_to_another_file(tree):
    move(tree, "tests/unit/test_ids.py", "tests/integration/tasks/test_callbacks.py")
    [found] = Suite(tree).of(mutant())
    assert found.node_id == "tests/integration/tasks/test_callbacks.py::test_an_id_stays"


def test_a_test_that_is_nowhere_or_ambiguous_is_an_error(tree):
    with pytest.raises(BrokenMutant, match="Test: test_gone: there is no such test"):
        Suite(tree).find("test_gone")
    with pytest.raises(BrokenMutant, match=r"2 tests have this name: .*TestLocal.*TestRedis"):
        Suite(tree).find("test_rule")


# -- which of them run -----------------------------------------------------------------


def git(tree: Path, *arguments: str) -> None:
    own = ("-c", "user.name=n", "-c", "user.email=n@example.org", "-c", "commit.gpgsign=false")
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    subprocess.run(["git", *own, *arguments], cwd=tree, env=env, check=True, capture_output=True)


@pytest.fixture
def checkout(tree: Path) -> Path:
    git(tree, "init", "--quiet")
    write(tree, "tests/mutants/g13/fresh.mutant", HEAD + CHILD_ID)
    git(tree, "add", ".")
    git(tree, "commit", "--quiet", "--message", "Begin")
    return tree


def is_near(tree: Path, each: Mutant | None = None) -> bool:
    each = each or mutant()
    return near([each], changed_since(tree, "HEAD"), Package.read(tree), Suite(tree)) == [each]


@pytest.mark.parametrize(
    "path", ["django_dlock/ids.py", "tests/unit/test_ids.py", "tests/mutants/g13/fresh.mutant"]
)
def test_a_mutant_runs_since_a_commit_if_its_file_its_test_or_itself_has_changed(checkout, path):
    write(checkout, "django_dlock/other.py", "")
    assert not is_near(checkout)
    with (checkout / path).open("a") as file:
        file.write("\n")
    assert is_near(checkout)


def test_a_mutant_runs_since_a_commit_if_its_file_has_moved(checkout):
    move(checkout, "django_dlock/ids.py", "django_dlock/core/ids.py")
    assert is_near(checkout)
    git(checkout, "add", ".")
    assert is_near(checkout)


def test_a_mutant_runs_since_a_commit_if_a_contract_has_changed_that_its_test_inherits(checkout):
    each = mutant(head=HEAD.replace("test_an_id_stays", "TestRedis::test_rule"))
    assert not is_near(checkout, each)
    write(
        checkout, "django_dlock/testing/contract.py", "class Contract:\n    def test_rule(s): 0\n"
    )
    assert is_near(checkout, each)


def test_a_broken_mutant_runs_since_any_commit(checkout):
    assert is_near(checkout, mutant(CHILD_ID.replace("str", "repr")))


def test_a_commit_draws_the_same_mutants_each_time(checkout):
    names = [f"g01/{number}" for number in range(386)]
    first = drawn(names, seed_of(checkout))
    assert len(first) == 120
    assert drawn(names[::-1], seed_of(checkout)) == first
    git(checkout, "commit", "--quiet", "--allow-empty", "--message", "Go on")
    assert drawn(names, seed_of(checkout)) != first
    assert drawn(names[:7], "") == set(names[:7])


def test_without_a_repository_the_version_draws(tree, monkeypatch):
    # Another repository may be around a package that was unpacked.
    git(tree.parent, "init", "--quiet")
    assert seed_of(tree) == "1.2"


def test_the_program_says_what_it_does_not_run(capsys):
    assert program.main(["--list"]) == 0
    output = capsys.readouterr().out
    assert f"{len(list(all_mutants())) - 120} mutants did not run: not chosen for " in output
    assert program.main(["--list", "--all"]) == 0
    assert "did not run" not in capsys.readouterr().out
    assert program.main(["--list", "G5"]) == 0
    output = capsys.readouterr().out
    assert "g05/own_grant_unknown" in output
    assert "g06/" not in output


# -- a new one -------------------------------------------------------------------------


def test_a_diff_is_printed_as_a_mutant(checkout):
    text = (
        "class A:\n    def f(self):\n        a()\n        b()\n        a()\n\n\ndef g():\n    a()\n"
    )
    write(checkout, "django_dlock/more.py", text)
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "--message", "Add more")
    after = text.replace("b()\n        a()", "b()\n        c()").replace(
        "def g():\n    a", "def g():\n    d"
    )
    write(checkout, "django_dlock/more.py", after)
    sections = from_diff(checkout)
    assert sections == dedent(
        """\
        In: f
                 b()
        -        a()
        +        c()

        In: g
        -    a()
        +    d()
        """
    )
    assert Package({"x.py": text}).changed(mutant(sections)) == {"x.py": after}
