"""The package's imports go in one direction, and one module alone imports JAX's internals."""

from collections.abc import Iterable
from pathlib import Path

import pytest

from tests.layers import Layers, find_violations, read_package

ROOT = Path(__file__).resolve().parent.parent

FLOORS = (
    ("geometry",),
    ("workers",),
    ("_jax",),
    # It imports no JAX, except for programs that JAX holds.
    ("hlo",),
    ("core",),
    ("core.sharding", "core.processes"),
    ("core.program",),
    ("core.array",),
    ("core.pjit",),
    # The functions of jax.numpy for arrays.
    ("numpy",),
    ("analysis",),
    ("analysis.programs",),
    ("analysis.report",),
    ("analysis.pictures", "analysis.recompile"),
    ("analysis.explain",),
    ("predict",),
    ("predict.targets",),
    ("predict.targets.tpu", "predict.targets.gpu"),
    ("predict.costs",),
    ("predict.preflight",),
    ("predict.sweep",),
    ("auto",),
    ("pods",),
    ("pods.multihost", "pods.testing"),
    # The package's public names, imported from the rooms below.
    ("startup", "tpu", "gpu", "hardware", "preflights", "multihost", "testing", "pjit"),
    # APIs of 2022 and 2023.
    ("legacy",),
    ("",),
    ("train",),
    ("cli",),
    ("cli.parsers",),
    ("cli.commands",),
    ("cli.main",),
    ("__main__",),
)
"""The rooms from below to above; those of a line are independent of each other."""

COMMON = frozenset({"errors", "config", "support", "_version"})

PURE = frozenset(
    {
        *("geometry", "workers", "hlo"),
        *("analysis.explain.comparison", "analysis.explain.model"),
        *("analysis.explain.program_report",),
        *("analysis.explain.script_report", "analysis.explain.sections"),
        *("analysis.programs.source_lines", "analysis.report"),
        *("analysis.pictures.picture_plan", "analysis.pictures.picture_text"),
        *("analysis.pictures.subject", "analysis.pictures.svg_html", "analysis.pictures.terminal"),
        *("predict.targets", "predict.costs", "predict.preflight.time_estimate"),
        *("predict.preflight.error_bar",),
        *("predict.preflight.attribution.hlo_dataflow", "predict.preflight.render"),
        *("predict.preflight.report.comparison", "predict.preflight.report.measured"),
        *("predict.preflight.report.preflight_model", "predict.preflight.report.preflight_report"),
        *("predict.preflight.report.pricing", "predict.preflight.report.profile_reader"),
        *("predict.preflight.report.step_model", "predict.sweep.axis_ranges"),
        *("predict.sweep.sweep_report", "predict.sweep.sweep_results"),
        *("auto.plan.plan_model", "auto.plan.plan_text"),
        *("tpu", "gpu", "hardware", "preflights"),
        *("legacy.entries", "legacy.migration", "train.config"),
        *("cli.main", "cli.parsers", "cli.commands.completion"),
        *("cli.commands.explain_command", "cli.commands.doctor", "cli.commands.legacy"),
        *("cli.commands.doctor_checks", "cli.commands.hosts", "cli.commands.tpu_host"),
        *("cli.commands.result_files", "cli.commands.script_run"),
        *("cli.commands.status_line",),
    }
)
"""Rooms and modules that work where JAX is absent, beside those that all may import."""

PRIVATE = frozenset(
    {
        *("core.array", "core.pjit", "numpy", "auto", "pods.multihost", "multihost", "pjit"),
        *("legacy", "train"),
        # Programs of pjit, and its cache misses.
        *("analysis.programs.from_pjit", "analysis.recompile"),
        # Commands for programs of pjit, layouts and training jobs.
        *("cli.commands.automatic_layouts", "cli.commands.compile", "cli.commands.legacy"),
        *("cli.commands.all_hosts", "cli.commands.reshard_checkpoint"),
    }
)
"""Rooms and modules of the private ring: they need JAX's private names (docs/how/architecture.md).

A report of a function of `jax.jit` loads none of them.
"""

XLASHARD = Layers(
    package="xlashard",
    rooms={room: number for number, floor in enumerate(FLOORS) for room in floor},
    common=COMMON,
    door="_jax.private",
    pure=PURE | COMMON,
    private=PRIVATE,
    # Tables and pages of reports, and the migration of programs.
    pure_allowed=frozenset({"jinja2", "libcst", "markupsafe", "numpy", "rich"}),
    deferred=frozenset(
        {
            ("xlashard.core.pjit.stages.compiled", "xlashard.core.pjit.stages.serialization"),
            # A script imports JAX itself, after it has set the variables that JAX reads.
            ("xlashard.cli.commands.explain_command", "xlashard.cli.commands.targets"),
            ("xlashard.cli.commands.explain_command", "xlashard.analysis.explain.comparison"),
            ("xlashard.cli.commands.explain_command", "xlashard.analysis.explain.script_report"),
            ("xlashard.cli.commands.script_run", "xlashard._jax.runtime.topologies"),
            ("xlashard.cli.commands.script_run", "xlashard._jax.trace.observed_programs"),
            ("xlashard.cli.commands.script_run", "xlashard.analysis.programs.from_script"),
            # A machine may be checked because its JAX is broken; hosts meet by JAX's cluster.
            ("xlashard.cli.commands.doctor", "xlashard.cli.commands.all_hosts"),
            # `xlashard --help` starts without it.
            ("xlashard.cli.main", "xlashard.cli.commands.other_python"),
            # The search for layouts loads SciPy's solver; other preflights don't.
            ("xlashard.cli.commands.preflight", "xlashard.cli.commands.automatic_layouts"),
            # A step of training needs the packages of the extra `train`; other programs don't.
            ("xlashard.cli.commands.targets", "xlashard.train.model.programs"),
            # The migration needs the extra `legacy`; running a program doesn't.
            ("xlashard.cli.commands.legacy", "xlashard.legacy.migration"),
        }
    ),
    hooks="xlashard.support.hooks",
    importers={
        "legacy": frozenset({"xlashard", "xlashard.cli.commands.legacy"}),
        "auto": frozenset(
            {
                "xlashard",
                "xlashard.cli.commands.automatic_layouts",
                "xlashard.cli.commands.reshard_checkpoint",
            }
        ),
        "train": frozenset(
            {
                "xlashard.cli.commands.automatic_layouts",
                "xlashard.cli.parsers.tool_parsers",
                "xlashard.cli.commands.targets",
                "xlashard.cli.commands.reshard_checkpoint",
            }
        ),
    },
)


def test_package_has_no_layer_violations() -> None:
    violations = find_violations(ROOT, XLASHARD)
    assert not violations, "\n" + "\n".join(map(str, violations))


def test_checker_reads_the_package() -> None:
    modules = read_package(ROOT, "xlashard")
    assert "xlashard._version" in modules
    seen = {target.target for module in modules.values() for target in module.imports}
    assert "numpy" in seen


@pytest.mark.parametrize("ring", [PURE, PRIVATE], ids=["pure", "private"])
def test_a_ring_names_rooms_and_modules(ring: frozenset[str]) -> None:
    assert not {f"xlashard.{name}" for name in ring} - set(read_package(ROOT, "xlashard"))


ONE_CONCEPT = {
    "base": "base class of a family",
    "comparison": "changes from one report to another: of programs, of preflights",
    "compile": "a stage of the pipeline: the compiler, its caches, the subcommand",
    "compiled": "a compiled program: as a stage, as a way to reshard",
    "dispatch": "a stage of the pipeline",
    "errors": "exception classes",
    "executables": "executables: of the runtime, shared by programs",
    "execute": "a stage of the pipeline: of programs, of reshards",
    "plan": "a plan as a frozen value: of a program, of a reshard",
    "tracebacks": "tracebacks without frames of this package, and of JAX",
    "topologies": "topologies: of the plugins, of TPUs and of GPUs by name",
}
"""Names of modules that several rooms have, for the same concept on different levels."""

MIRRORS = (
    "xlashard.legacy.arrays.",
    "xlashard.legacy.modules.",
    "xlashard.legacy.shardings.",
    "xlashard.legacy.entries.",
    # Public paths.
    "xlashard.tpu",
    "xlashard.pjit.",
)
"""Modules that have the names of others: of JAX's, or of those that they make public."""


def _repeated(named: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    places: dict[str, list[str]] = {}
    for name, module in named:
        if not module.startswith(MIRRORS):
            places.setdefault(name, []).append(module)
    return {name: found for name, found in places.items() if len(found) > 1}


def test_class_names_are_unique() -> None:
    modules = read_package(ROOT, "xlashard").values()
    named = [(name, module.name) for module in modules for name in module.classes]
    assert len(named) > 500
    assert not _repeated(named)


def test_module_names_are_unique() -> None:
    files = [m for m in read_package(ROOT, "xlashard").values() if not m.is_package]
    named = ((module.path.stem, module.name) for module in files)
    assert set(_repeated(named)) == {*ONE_CONCEPT, "__main__"}


SMALL = Layers(
    package="pkg",
    rooms={"low": 0, "door": 1, "left": 2, "right": 2, "": 3, "top": 4},
    common=frozenset({"errors", "lazily"}),
    door="door",
    pure=frozenset({"low", "right.tables"}),
    private=frozenset({"left.kept"}),
)

SOUND = {
    "pkg/__init__.py": "from pkg.left import thing\nfrom .right.one import other\n",
    "pkg/errors.py": "import enum\n",
    "pkg/low/__init__.py": "from .maths import area\n",
    "pkg/low/maths.py": "import math\nimport numpy as np\nfrom pkg import errors\n",
    "pkg/door/__init__.py": "import jax._src.core\nfrom jaxlib import xla_client\n",
    "pkg/lazily.py": "def deferred(name): ...\n",
    "pkg/left/__init__.py": "from pkg.left.thing import thing\n",
    "pkg/left/thing.py": "import jax\nfrom pkg.low.maths import area\nfrom pkg.door import x\n",
    "pkg/left/kept.py": "import jax\n",
    "pkg/right/tables.py": """
from typing import TYPE_CHECKING
from pkg.lazily import deferred
if TYPE_CHECKING:
    import jax
    from pkg.door import x
else:
    x = deferred("pkg.door")
def place(array: "jax.Array"):
    import jax
    return jax.device_put(array)
""",
    "pkg/right/one.py": "from .. import low\nother = low.area\n",
    "pkg/top.py": "import pkg\n\ndef late():\n    import json\n",
}


def plant(root: Path, files: dict[str, str]) -> list[str]:
    """Write the valid tree with `files` over it and return the checker's findings."""
    for name, text in (SOUND | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return [str(violation) for violation in find_violations(root, SMALL)]


def test_a_sound_tree_has_no_violations(tmp_path: Path) -> None:
    assert plant(tmp_path, {}) == []


UPWARDS = "pkg/low/maths.py:1: low (0) imports left (2)"
DOOR = "used outside door"

PLANTED = {
    "upwards": ("pkg/low/maths.py", "import pkg.left.thing", UPWARDS),
    "upwards, by name": ("pkg/low/maths.py", "from pkg.left import thing", UPWARDS),
    "upwards, package": ("pkg/low/maths.py", "from pkg import left", UPWARDS),
    "upwards, relative": ("pkg/low/maths.py", "from ..left.thing import thing", UPWARDS),
    "upwards, conditional": (
        "pkg/low/maths.py",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from pkg.left import thing",
        "pkg/low/maths.py:3: low (0) imports left (2)",
    ),
    "sideways": ("pkg/right/one.py", "from pkg.left import thing", "right (2) imports left (2)"),
    "to the face": ("pkg/left/thing.py", "import pkg", "left (2) imports pkg (3)"),
    "face upwards": ("pkg/__init__.py", "from pkg import top", "pkg (3) imports top (4)"),
    "common to room": ("pkg/errors.py", "from pkg.low import area", "may import no room"),
    "no such room": ("pkg/attic.py", "", "pkg.attic is in no room"),
    "in a function": (
        "pkg/left/thing.py",
        "def f():\n    from pkg.low import area",
        "pkg/left/thing.py:2: import of pkg.low inside a function",
    ),
    "in a method": (
        "pkg/left/thing.py",
        "class A:\n    async def f(self):\n        import pkg.low.maths",
        "import of pkg.low.maths inside a function",
    ),
    "by import_module": (
        "pkg/left/thing.py",
        "import importlib\ndef f():\n    return importlib.import_module('pkg.right.one')",
        "import of pkg.right.one inside a function",
    ),
    "cycle in a room": (
        "pkg/left/thing.py",
        "from pkg.left import name",
        "import cycle pkg.left.thing → pkg.left → pkg.left.thing",
    ),
    "cycle of one": ("pkg/left/thing.py", "import pkg.left.thing", "import cycle pkg.left.thing"),
    "internals": ("pkg/left/thing.py", "import jax._src.core as core", f"jax._src.core {DOOR}"),
    "internals by name": ("pkg/left/thing.py", "from jax import _src", f"jax._src {DOOR}"),
    "interpreters": ("pkg/left/thing.py", "from jax.interpreters import mlir", DOOR),
    "extend": ("pkg/left/thing.py", "from jax import extend", f"jax.extend {DOOR}"),
    "jaxlib": ("pkg/left/thing.py", "def f():\n    from jaxlib import _jax", f"jaxlib._jax {DOOR}"),
    "libtpu": ("pkg/left/thing.py", "import libtpu", f"libtpu {DOOR}"),
    "internals by attribute": (
        "pkg/left/thing.py",
        "import jax\nx = jax._src.core.Tracer",
        f"pkg/left/thing.py:2: jax._src {DOOR}",
    ),
    "internals by name of a module": (
        "pkg/left/thing.py",
        "from importlib import import_module\nx = import_module('jaxlib.xla_client')",
        f"jaxlib.xla_client {DOOR}",
    ),
    "impure": ("pkg/low/maths.py", "import jax", "jax used in what a pure room imports"),
    "impure at second hand": (
        "pkg/errors.py",
        "import jax",
        "pkg/errors.py:1: jax used in what a pure room imports: "
        "pkg.low.maths → pkg.errors → jax (only numpy)",
    ),
    "impure, by the package around it": (
        "pkg/right/__init__.py",
        "import jax",
        "jax used in what a pure room imports: pkg.right.tables → pkg.right → jax",
    ),
    "impure, a single module": (
        "pkg/right/tables.py",
        "import rich",
        "pkg/right/tables.py:1: rich used in what a pure room imports: pkg.right.tables → rich",
    ),
    "impure beside types": (
        "pkg/low/maths.py",
        "import typing\nif typing.TYPE_CHECKING:\n    import jax\nelse:\n    import jaxlib",
        "pkg/low/maths.py:5: jaxlib used in what",
    ),
    "impure by import_module": (
        "pkg/low/maths.py",
        "import importlib\njax = importlib.import_module('jax')",
        "pkg/low/maths.py:2: jax used in what",
    ),
    "private": (
        "pkg/left/thing.py",
        "from pkg.left import kept",
        "pkg.left.thing of the public ring imports pkg.left.kept of the private one",
    ),
    "upwards, deferred": (
        "pkg/low/maths.py",
        "from pkg.lazily import deferred\nthing = deferred('pkg.left.thing')",
        "pkg/low/maths.py:2: low (0) imports left (2)",
    ),
}


@pytest.mark.parametrize(("path", "text", "expected"), PLANTED.values(), ids=PLANTED.keys())
def test_a_planted_violation_is_found(tmp_path: Path, path: str, text: str, expected: str) -> None:
    found = plant(tmp_path, {path: text})
    assert any(expected in line for line in found), found


def test_a_cycle_across_three_modules_is_reported_in_full(tmp_path: Path) -> None:
    found = plant(
        tmp_path,
        {
            "pkg/left/a.py": "from pkg.left import b",
            "pkg/left/b.py": "from .c import x",
            "pkg/left/c.py": "from pkg.left.a import y",
        },
    )
    assert found == [
        "pkg/left/c.py:1: import cycle pkg.left.a → pkg.left.b → pkg.left.c → pkg.left.a"
    ]
