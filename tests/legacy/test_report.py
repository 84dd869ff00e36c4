"""Which names ran, counted and told."""

import io
import json
import re
import runpy
import sys
import sysconfig
from dataclasses import replace
from pathlib import Path

import jax
import pytest

from xlashard.legacy.flags import jax_array
from xlashard.legacy.installing import INSTALLER
from xlashard.legacy.report import json_of, show_report, text_of
from xlashard.legacy.table import entries
from xlashard.legacy.uses import Recorder, Use

TREE_MAP = Use(entries()["jax.tree_map"], "/far/away.py", 3, 2)
VAR = Use(entries()["jax.core.Var"], str(Path.cwd() / "near.py"), 1, 1)
INSTALLED = replace(TREE_MAP, file=f"{sysconfig.get_path('purelib')}/old/code.py")


@pytest.fixture
def recorder():
    recorder = Recorder()
    assert INSTALLER.install(recorder.listen)
    recorder.start()
    yield recorder
    recorder.end()
    INSTALLER.uninstall()


def counted(recorder: Recorder) -> dict[tuple[str, int], int]:
    return {(use.entry.name, use.line): use.count for use in recorder.uses()}


@pytest.fixture
def run(tmp_path: Path):
    """Runs a program that lies in a file."""

    def run(code: str) -> None:
        file = tmp_path / "program.py"
        file.write_text(code)
        runpy.run_path(str(file))

    return run


def test_imports_calls_and_attributes(recorder: Recorder, run) -> None:
    run(
        "import jax\n"
        "from jax import tree_map as over\n"
        "for _ in range(4): over(abs, [1])\n"
        "jax.tree_leaves([1]); jax.tree_leaves([1])\n"
        "jax.tree_util.tree_leaves([1])\n"
        "import jax.linear_util\n"
        "jax.linear_util.wrap_init(abs)\n"
        "isinstance(1, jax.core.Var)\n"
    )
    assert counted(recorder) == {
        ("jax.tree_map", 2): 1,
        ("jax.tree_map", 3): 4,
        ("jax.tree_leaves", 4): 2,
        ("jax.linear_util", 7): 1,
        ("jax.linear_util.wrap_init", 7): 1,
        ("jax.core.Var", 8): 1,
    }


def test_modules_whose_names_have_no_entry(recorder: Recorder, run) -> None:
    run("from jax.linear_util import hashable_partial")
    assert counted(recorder)["jax.linear_util.hashable_partial", 1] == 1


def test_flags(recorder: Recorder, run) -> None:
    try:
        run("import jax\njax.config.update('jax_array', False)\njax.config.jax_array")
    finally:
        jax.config.update("jax_array", True)
    assert counted(recorder)["jax.config.jax_array", 2] == 1


def test_packages_are_no_programs(recorder: Recorder) -> None:
    exec(compile("import jax\njax.tree_map", jax.__file__, "exec"), {"__name__": "program"})
    assert counted(recorder) == {}


def test_afterwards_nothing_is_watched() -> None:
    tools = [sys.monitoring.get_tool(n) for n in range(6)]
    hooks = jax_array._update_global_hook, jax_array._update_thread_local_hook
    recorder = Recorder()
    recorder.start()
    assert "xlashard.legacy" in [sys.monitoring.get_tool(n) for n in range(6)]
    recorder.end()
    assert [sys.monitoring.get_tool(n) for n in range(6)] == tools
    assert (jax_array._update_global_hook, jax_array._update_thread_local_hook) == hooks


def test_text() -> None:
    assert text_of([TREE_MAP, VAR, INSTALLED]).splitlines() == [
        "2 names of 2022 and 2023 ran, at 3 lines",
        "jax.core.Var (until JAX 0.6.0); today: jax.extend.core.Var",
        "  differs: it is made of an abstract value alone and has no `count` or `suffix`",
        "  near.py:1",
        "jax.tree_map (until JAX 0.6.0); today: jax.tree.map",
        "  /far/away.py:3 ×2",
        "  old/code.py:3 ×2",
    ]
    assert "needs" not in text_of([TREE_MAP])
    assert "as it is" in text_of([])


def test_json() -> None:
    uses = json.loads(json_of([TREE_MAP, INSTALLED]))["uses"]
    assert [use["name"] for use in uses] == ["jax.tree_map"]
    assert uses[0]["count"] == 4
    assert [line["installed"] for line in uses[0]["lines"]] == [False, True]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_colours_and_a_file_gets_text(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file = Terminal(), io.StringIO()
    show_report([TREE_MAP, VAR], terminal)
    show_report([TREE_MAP, VAR], file)
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 40
    # No name is broken, however narrow it is.
    for line in ("jax.tree_map  until JAX 0.6.0", "  today  jax.tree.map", "  /far/away.py:3 ×2"):
        assert line in [line.rstrip() for line in lines]
    assert file.getvalue() == text_of([TREE_MAP, VAR])
    show_report([], terminal)
    assert "as it is" in terminal.getvalue()


def test_after_its_end_nothing_is_called_any_more() -> None:
    recorder = Recorder()
    recorder.start()
    tool = recorder._tool
    assert tool is not None
    recorder.end()
    monitoring = sys.monitoring
    monitoring.use_tool_id(tool, "a test")
    try:
        assert monitoring.get_events(tool) == monitoring.events.NO_EVENTS
        assert monitoring.register_callback(tool, monitoring.events.CALL, None) is None
    finally:
        monitoring.free_tool_id(tool)
