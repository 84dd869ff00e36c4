"""Report of the removed names that a program used, with counts."""

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

from tests.legacy.modules.replacements import leads_somewhere
from xlashard.legacy.installer import INSTALLER
from xlashard.legacy.modes.config_flags import jax_array
from xlashard.legacy.modules import entries
from xlashard.legacy.recorder import BEHAVIOURS, Recorder, Use
from xlashard.legacy.usage_report import Report, json_of, show_report, text_of

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
    """Return a function that runs a program in a file."""

    def run(code: str) -> None:
        file = tmp_path / "program.py"
        file.write_text(code)
        runpy.run_path(str(file))

    return run


def test_imports_calls_and_attributes_are_counted(recorder: Recorder, run) -> None:
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


def test_methods_of_classes_are_counted(recorder: Recorder, run) -> None:
    run("import jax\nx = jax.numpy.ones(2)\nfor _ in range(3): x.to_py(), x.device()\n")
    assert counted(recorder) == {("jax.Array.to_py", 3): 3, ("jax.Device.__call__", 3): 3}


def test_uses_of_names_without_an_entry_are_counted(recorder: Recorder, run) -> None:
    run("from jax.linear_util import hashable_partial")
    assert counted(recorder)["jax.linear_util.hashable_partial", 1] == 1


def test_flag_reads_are_counted(recorder: Recorder, run) -> None:
    try:
        run("import jax\njax.config.update('jax_array', False)\njax.config.jax_array")
    finally:
        jax.config.update("jax_array", True)
    assert counted(recorder)["jax.config.jax_array", 2] == 1


def test_uses_within_packages_are_not_counted(recorder: Recorder) -> None:
    exec(compile("import jax\njax.tree_map", jax.__file__, "exec"), {"__name__": "program"})
    assert counted(recorder) == {}


def test_end_of_recorder_restores_monitoring_tools_and_hooks() -> None:
    tools = [sys.monitoring.get_tool(n) for n in range(6)]
    hooks = jax_array._update_global_hook, jax_array._update_thread_local_hook
    recorder = Recorder()
    recorder.start()
    assert "xlashard.legacy" in [sys.monitoring.get_tool(n) for n in range(6)]
    recorder.end()
    assert [sys.monitoring.get_tool(n) for n in range(6)] == tools
    assert (jax_array._update_global_hook, jax_array._update_thread_local_hook) == hooks


OTHER_NAMES = """\
import jax
import numpy as np
from functools import partial
from jax.experimental.pjit import pjit
from jax.experimental.maps import thread_resources, Mesh
from jax.experimental.global_device_array import GlobalDeviceArray
from jax.experimental import PartitionSpec as P
import beside
maybe = pjit
partial(pjit, in_axis_resources=P(), out_axis_resources=P())(abs)
maybe(abs, P(), P())
mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
thread_resources.env
GlobalDeviceArray.from_callback((8,), mesh, P(), lambda index: np.ones(8))
jax.config.jax_array
jax.pxla._is_unspecified
beside.also(abs, P(), P())
"""


def test_uses_through_aliases_are_counted(recorder: Recorder, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "beside.py").write_text("from jax.experimental.pjit import pjit as also\n")
    (tmp_path / "main.py").write_text(OTHER_NAMES)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        runpy.run_path(str(tmp_path / "main.py"))
    finally:
        sys.modules.pop("beside", None)
    lines: dict[str, list[int]] = {}
    for use in recorder.uses():
        if use.file.endswith("main.py"):
            lines.setdefault(use.entry.name.rpartition(".")[2], []).append(use.line)
    assert lines["pjit"] == [4, 10, 11, 17]
    assert lines["thread_resources"] == [5, 13]
    assert lines["GlobalDeviceArray"] == [6, 14]
    assert lines["jax_array"] == [15]
    assert lines["_is_unspecified"] == [16]
    by_name = {use.entry.name: use.entry.today for use in recorder.uses()}
    row = entries()["jax.interpreters.pxla._is_unspecified"]
    assert by_name["jax.pxla._is_unspecified"] == row.today


def test_changed_behaviours_without_a_removed_name_are_counted(recorder: Recorder, run) -> None:
    run(
        "import contextlib, jax\n"
        "import numpy as np\n"
        "from jax.experimental import pjit as p\n"
        "mesh = jax.sharding.Mesh(np.array(jax.devices()), ('x',))\n"
        "with mesh: pass\n"
        "with contextlib.ExitStack() as stack:\n"
        "    stack.enter_context(mesh)\n"
        "p.pjit(abs, {'w': None}, jax.P())\n"
        "p.pjit(abs, jax.P(), (jax.P(), None))\n"
        "p.pjit(abs, jax.P(), jax.P())\n"
        "with jax.set_mesh(mesh): pass\n"
    )
    names = [behaviour.name for behaviour in BEHAVIOURS]
    parsed = {key: count for key, count in counted(recorder).items() if key[0] in names}
    assert parsed == {
        ("with mesh:", 5): 1,
        ("with mesh:", 7): 1,
        ("in_axis_resources=None", 8): 1,
        ("out_axis_resources=None", 9): 1,
    }


def test_removed_arguments_are_counted_at_the_lines_of_the_program(recorder: Recorder, run) -> None:
    run(
        "import jax, jax.numpy as jnp\n"
        "x = jnp.arange(4.0)\n"
        "for _ in range(3): jnp.clip(x, a_min=1, a_max=2)\n"
        "jax.jit(lambda x: x.clip(a_min=0))(x)\n"
        "jnp.sort(x, 0, 'stable'); jnp.sort(x, 0); jnp.array(x, jnp.float32, True)\n"
        "jax.ShapeDtypeStruct((2,), jnp.float32, named_shape={})\n"
        "jnp.clip(x, 0, 1)\n"
    )
    assert counted(recorder) == {
        ("jax.numpy.clip(a_min=)", 3): 3,
        ("jax.numpy.clip(a_max=)", 3): 3,
        ("jax.Array.clip(a_min=)", 4): 1,
        ("jax.numpy.sort(kind=)", 5): 1,
        ("jax.numpy.array(..., copy)", 5): 1,
        ("jax.ShapeDtypeStruct(named_shape=)", 6): 1,
    }


HOSTILE = """\
import functools, jax
from jax.experimental.pjit import pjit
from jax.experimental import PartitionSpec as P
LOG = []
def note(name):
    def record(*args, **kwargs):
        LOG.append(name)
        raise KeyError(name)
    return record
ASKED = ("__getattribute__", "__getattr__", "__eq__", "__ne__", "__hash__", "__bool__", "__repr__",
    "__instancecheck__", "__subclasscheck__", "__len__", "__iter__", "__contains__", "__get__")
MEMBERS = {**{name: note(name) for name in ASKED}, "__class__": property(note("__class__")),
    "__self__": property(note("__self__")), "__func__": property(note("__func__")),
    "__module__": property(note("__module__")), "func": property(note("func"))}
Meta = type("Meta", (type,), dict(MEMBERS))
def work(self, *rest): return 5
Proxy = Meta("Proxy", (), {**MEMBERS, "__call__": work, "__setattr__": work, "work": work,
    "__init__": lambda self: None})
type.__setattr__(Proxy, "of_class", classmethod(work))
proxy = Proxy()
def take(x=None, *rest): pass
def method(x): return object.__getattribute__(x, "work")
HIDDEN = {name: MEMBERS[name] for name in ("func", "__class__")}
Partial = type("Partial", (functools.partial,), HIDDEN)
class Node:
    flattened = 0
    def flatten(self):
        Node.flattened += 1
        return (None,), None
jax.tree_util.register_pytree_node(Node, Node.flatten, lambda _, leaves: Node())
for again in range(2):
    proxy(); method(proxy)(proxy); object.__setattr__(proxy, "x", proxy); take(proxy); take(x=proxy)
    type.__getattribute__(Proxy, "of_class")(proxy); type.__call__(Proxy)
    functools.partial(take, proxy)()
    Partial(take)(proxy); super(Proxy, proxy).__setattr__("y", proxy)
    jax.tree_leaves([proxy]); jax.tree_map(take, [proxy])
    pjit(take, Node(), P()); isinstance(3, jax.core.Var)
jax.interpreters.pxla.of_program = proxy
jax.interpreters.pxla.of_program()
"""


def test_recorder_runs_no_code_of_the_program(run, tmp_path: Path) -> None:
    def run_it() -> tuple[list[str], int]:
        space = runpy.run_path(str(tmp_path / "hostile.py"))
        return space["LOG"], space["Node"].flattened

    (tmp_path / "hostile.py").write_text(HOSTILE)
    INSTALLER.install()
    expected = run_it()
    INSTALLER.uninstall()
    recorder = Recorder()
    INSTALLER.install(recorder.listen)
    recorder.start()
    try:
        assert run_it() == expected
    finally:
        recorder.end()
        INSTALLER.uninstall()
    assert {"jax.tree_leaves", "in_axis_resources=None"} <= {name for name, _ in counted(recorder)}


def test_names_of_current_jax_are_not_reported() -> None:
    staying = [entry for entry in entries().values() if entry.stays]
    assert {"jax.sharding.Mesh", "jax.pmap"} <= {entry.name for entry in staying}
    assert Report.of([Use(entry, "/far/away.py", 1, 1) for entry in staying]) == Report([], [])
    for entry in staying:
        assert leads_somewhere(entry.name)
    module = "jax.experimental.array_serialization.serialization"
    served = replace(entries()[module], name=f"{module}.run_serialization")
    assert served.stays
    assert not entries()[f"{module}._get_metadata"].stays


def test_text_of_a_report() -> None:
    assert text_of(Report.of([TREE_MAP, VAR, INSTALLED])).splitlines() == [
        "2 removed names used, at 2 lines",
        "jax.core.Var (until JAX 0.6.0); today: jax.extend.core.Var",
        "  differs: its constructor takes only an abstract value, "
        "and it has no `count` or `suffix`",
        "  near.py:1",
        "jax.tree_map (until JAX 0.6.0); today: jax.tree.map",
        "  /far/away.py:3 ×2",
        "in installed packages, not counted: their newer releases use today's names",
        "jax.tree_map (until JAX 0.6.0); today: jax.tree.map",
        "  old/code.py:3 ×2",
    ]
    assert "needs" not in text_of(Report.of([TREE_MAP]))
    assert "no removed names" in text_of(Report.of([]))
    assert "no removed names" in text_of(Report.of([INSTALLED]))
    crashed = Report.of([], failure="KeyError")
    assert text_of(crashed) == "no removed names were used, before KeyError ended the program\n"
    behaviour = Use(BEHAVIOURS[0], "/far/away.py", 3, 1)
    assert "\nwith mesh:; today: with jax.set_mesh(mesh):\n" in text_of(Report.of([behaviour]))


def test_uses_in_the_program_folder_count_as_its_own() -> None:
    folder = str(Path(INSTALLED.file).parent)
    assert Report.of([INSTALLED], folder) == Report([INSTALLED], [])


def test_json_of_a_report() -> None:
    parsed = json.loads(json_of(Report.of([TREE_MAP, INSTALLED])))
    assert [use["name"] for use in parsed["uses"]] == ["jax.tree_map"]
    assert parsed["uses"][0]["count"] == 2
    assert [line["file"] for line in parsed["uses"][0]["lines"]] == [TREE_MAP.file]
    assert [line["file"] for line in parsed["installed"][0]["lines"]] == [INSTALLED.file]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_report_is_coloured_only_in_a_terminal(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    terminal, file = Terminal(), io.StringIO()
    report = Report.of([TREE_MAP, VAR])
    show_report(report, terminal)
    show_report(report, file)
    lines = re.sub(r"\x1b\[[\d;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 40
    # No name is broken, however narrow it is.
    for line in ("jax.tree_map  until JAX 0.6.0", "  today  jax.tree.map", "  /far/away.py:3 ×2"):
        assert line in [line.rstrip() for line in lines]
    assert file.getvalue() == text_of(report)
    show_report(Report.of([]), terminal)
    assert "no removed names" in terminal.getvalue()


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (KeyError("w"), "KeyError"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(2), "exit code 2"),
        (SystemExit("no data"), "exit code 1"),
        (SystemExit(0), ""),
        (SystemExit(False), ""),
        (SystemExit(), ""),
    ],
)
def test_failure_of_the_program_is_recorded(error: BaseException, failure: str) -> None:
    recorder = Recorder()
    recorder.record_failure(error)
    assert recorder.failure == failure


def test_end_of_recorder_unregisters_monitoring_callbacks() -> None:
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
