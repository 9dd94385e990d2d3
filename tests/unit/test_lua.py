"""The files of Lua say what they take, and take what they say."""

from __future__ import annotations

import re

import pytest

from django_dlock.backends.redis import scripts
from django_dlock.backends.redis.lua_source import LUA, Script
from tests.support.lua_files import ALL_CONSTANTS, COMMANDS, PARTS, LuaFile, declared, used

FILES = [*COMMANDS, *PARTS.values()]
SERVER_DEFINES = """ARGV KEYS cjson ipairs math pairs pcall redis string table tonumber tostring
    type unpack"""

every_file = pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
every_command = pytest.mark.parametrize("file", COMMANDS, ids=lambda file: file.name)
every_part = pytest.mark.parametrize("file", PARTS.values(), ids=lambda file: file.name)


def declared_for(needs: list[str]) -> set[str]:
    """What these names and parts declare."""
    return {name for need in needs for name in (PARTS[need].offers if need in PARTS else {need})}


def test_every_command_of_redis_has_a_script_of_its_name() -> None:
    made = {name for name, value in vars(scripts).items() if isinstance(value, Script)}
    assert {file.name.upper() for file in COMMANDS if file.path.parent == LUA} == made


@every_command
def test_a_command_says_what_it_does_takes_and_answers(file: LuaFile) -> None:
    assert re.match(r"[A-Z]", file.header[0])
    assert file.section("KEYS")
    assert file.section("ARGV") is not None
    assert {"Answer:", "Answer: none"}.intersection(file.header)


@every_command
@pytest.mark.parametrize("title", ["KEYS", "ARGV"])
def test_a_command_names_its_arguments_in_the_first_lines_and_uses_them(
    file: LuaFile, title: str
) -> None:
    said = file.section(title)
    wanted = [name for name in said if name.isidentifier()]
    lines = file.own_code[:5]
    naming = [line for line in lines if re.match(rf"\s*local .*(= |\(){title}\b", line)]
    named = list(declared(*naming))
    # What stands before another script takes its own arguments from the end.
    if "script..." in said:
        named.reverse()
    assert [name for name in named if name in wanted] == wanted
    assert set(named) <= {name.rstrip(".?") for name in said}
    rest = [line for line in file.own_code if line not in naming]
    needed = {need for part in file.included for need in PARTS[part].needs}
    assert set(wanted) <= used(rest) | needed


@every_file
def test_every_name_is_declared_before_it_is_used(file: LuaFile) -> None:
    known = set(SERVER_DEFINES.split()) | declared_for(file.needs)
    for line in file.code:
        known.update(declared(line))
        assert used([line]) <= known, line


@every_command
def test_a_command_includes_what_it_needs_and_nothing_else(file: LuaFile) -> None:
    needed = {need for part in file.included for need in PARTS[part].needs}
    before: list[str] = []
    for line in file.lines:
        if line.startswith("--- include"):
            part = PARTS[line.removeprefix("--- include ")]
            assert part.name in needed or part.offers & used(file.own_code), part.name
            assert set(part.needs) <= {*before, *declared(*file.own_code[:3])}
            assert part.name not in before
            before.append(part.name)


@every_part
def test_a_part_is_shared_and_uses_what_it_needs(file: LuaFile) -> None:
    assert sum(file.name in command.included for command in COMMANDS) > 1
    # Which a reader of a command then sees in the command.
    assert file.included == []
    for need in file.needs:
        assert declared_for([need]) & used(file.own_code), need


@every_file
def test_only_code_is_sent(file: LuaFile) -> None:
    # A comment after code, or a long text that has such a line, would be sent or cut.
    assert not [line for line in file.code if not line.strip() or "--" in line or "[[" in line]


def test_every_constant_is_used() -> None:
    words = set(re.findall(r"\w+", "\n".join(line for file in FILES for line in file.own_code)))
    assert set(ALL_CONSTANTS) <= words
