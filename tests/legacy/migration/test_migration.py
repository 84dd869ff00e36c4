"""Migration of single lines of 2022 and 2023."""

import pytest

from xlashard.legacy.migration import migrate
from xlashard.legacy.migration.inserted_functions import function_names, functions_with_callees
from xlashard.legacy.migration.resolver import Mark, Module, Rename, canonical, rule_of
from xlashard.legacy.modules import entries

# Old text and new text, after a line `import jax` or alone.
BECOMES = {
    "a name behind a dot": (
        "import jax\nx = jax.tree_map(abs,  [1])  # kept\n",
        "import jax\nx = jax.tree.map(abs,  [1])  # kept\n",
    ),
    "an imported name": (
        "from jax.experimental.maps import Mesh as M\nM([], ())\n",
        "from jax.sharding import Mesh as M\nM([], ())\n",
    ),
    "names of one import": (
        "from jax.experimental import PartitionSpec as P, maps, mesh_utils\nx = maps.Mesh, P\n",
        "import jax\nfrom jax.experimental import mesh_utils\nfrom jax import P\n"
        "x = jax.sharding.Mesh, P\n",
    ),
    "a module": (
        "from jax import linear_util as lu\nlu.wrap_init(abs)\n",
        "from jax.extend import linear_util as lu\nlu.wrap_init(abs)\n",
    ),
    "a sharding of JAX": (
        "import jax\nisinstance(1, jax.pxla.PartitionSpec)\n",
        "import jax\nisinstance(1, jax.P)\n",
    ),
    "pjit by position": (
        "from jax.experimental.pjit import pjit\nf = pjit(abs, None, (P('x'), None), 1)\n",
        "import jax\nf = _jit_on_mesh(abs, in_shardings=jax.P(), "
        "out_shardings=(_none_is_replicated(P('x')), jax.P()), static_argnums=1)\n",
    ),
    "pjit as a decorator": (
        "from functools import partial\nfrom jax import P\n"
        "from jax.experimental.pjit import pjit, FROM_GDA\n\n\n"
        "@partial(\n    pjit,\n    in_axis_resources=FROM_GDA,  # as it lies\n"
        "    out_axis_resources=P('x'),\n)\ndef f(x):\n    return x\n",
        "import jax\nfrom functools import partial\nfrom jax import P\n\n\n"
        "@partial(\n    _jit_on_mesh,\n    in_shardings=None,  # as it lies\n"
        "    out_shardings=P('x'),\n)\ndef f(x):\n    return x\n",
    ),
    "another name for pjit": (
        "from jax.experimental.pjit import pjit\nmaybe = pjit\n"
        "f = maybe(abs, out_axis_resources=None), pjit(abs), pjit(*args)\n",
        "import jax\nmaybe = _pjit\n"
        "f = maybe(abs, out_axis_resources=None), jax.jit(abs), _pjit(*args)\n",
    ),
    "a variable that is a spec": (
        "from jax import P\nfrom jax.experimental.pjit import pjit\nrows = {'w': P('x')}\n"
        "f = pjit(abs, rows, rows)\n",
        "import jax\nfrom jax import P\nrows = {'w': P('x')}\n"
        "f = _jit_on_mesh(abs, in_shardings=rows, out_shardings=rows)\n",
    ),
    "with mesh": (
        "import jax\nfrom jax.experimental.maps import Mesh\n"
        "with Mesh(d, 'x') as mesh:\n    pass\n",
        "import jax\nfrom jax.sharding import Mesh\nwith Mesh(d, 'x') as mesh:\n    pass\n",
    ),
    "the axis resources of a constraint": (
        "from jax.experimental.pjit import with_sharding_constraint as wsc\n"
        "wsc(x, axis_resources=None)\nf = [wsc]\n",
        "import jax\nfrom jax.lax import with_sharding_constraint as wsc\n"
        "wsc(x, shardings=None)\nf = [_with_sharding_constraint]\n",
    ),
    "the mesh in force": (
        "import jax\nfrom jax.experimental import maps\nenv = maps.thread_resources.env\n"
        "x = env.physical_mesh.empty or env.shape['mp']\n"
        "y = maps.thread_resources.env.physical_mesh.devices.shape != ()\n",
        "import jax\nenv = _mesh_in_force()\nx = env.empty or env.shape['mp']\n"
        "y = _mesh_in_force().devices.shape != ()\n",
    ),
    "flags": (
        "import jax\njax.config.update('jax_array', True)\n\n\ndef f(x):\n"
        "    if not jax.config.jax_array:\n        return 1\n"
        "    if jax.config.jax_array and x:\n        return 2\n    return 3\n",
        "import jax\n\n\ndef f(x):\n    if x:\n        return 2\n    return 3\n",
    ),
    "code behind a flag that is always on": (
        "import jax\ndef f(x):\n    # Today's.\n    if jax.config.jax_array:\n"
        "        return 1\n    return 2\n",
        "import jax\ndef f(x):\n    # Today's.\n    return 1\n",
    ),
    "a GlobalDeviceArray": (
        "import jax\nfrom jax.experimental.global_device_array import GlobalDeviceArray as G\n"
        "x = G.from_callback(shape, mesh, axes, read)\ny = x.local_data(0), x.mesh_axes\n",
        "import jax\nx = jax.make_array_from_callback(shape, "
        "jax.sharding.NamedSharding(mesh, axes), read)\n"
        "y = x.addressable_data(0), x.sharding.spec\n",
    ),
    "a spec as a tuple": (
        "import jax\nfrom jax import P\nx = isinstance(spec, tuple) and spec == (None, 'x')\n"
        "y = isinstance(x, (list, tuple)), P('x') != ('x',), m.axis_names == ('x',)\n",
        "import jax\nfrom jax import P\n"
        "x = isinstance(spec, (tuple, jax.P)) and _as_tuple(spec) == (None, 'x')\n"
        "y = isinstance(x, (list, tuple, jax.P)), tuple(P('x')) != ('x',), "
        "m.axis_names == ('x',)\n",
    ),
    "global avals": (
        "f.lower(x, _global_avals=True)\ng = {'_global_avals': True}\n",
        "f.lower(x)\ng = {}\n",
    ),
    "what is not JAX's": (
        "def pjit(f, in_axis_resources): ...\npjit(abs, in_axis_resources=None)\nx.tree_map(1)\n",
        None,
    ),
    "a program's own field": (
        "import jax\nclass Model:\n    mesh_axes: tuple\ny = model.mesh_axes\n",
        None,
    ),
    "a program's own attribute": (
        "import jax\nclass Model:\n    def __init__(self, a):\n        self.mesh_axes = a\n"
        "y = model.mesh_axes\n",
        None,
    ),
    "an attribute of what other modules make": (
        "import jax\ny = x.mesh_axes\n",
        'import jax\ny = _old_attribute(x, "mesh_axes")\n',
    ),
    "nothing": ("", None),
    "windows": ("import jax\r\njax.tree_map\r\n", "import jax\r\njax.tree.map\r\n"),
}


@pytest.mark.parametrize(("old", "new"), BECOMES.values(), ids=BECOMES)
def test_line_migrates_to_the_expected_code(old: str, new: str | None) -> None:
    migrated = migrate(old)
    code = migrated.code
    for function in functions_with_callees(function_names()).values():
        code = code.replace(f"\n\n{function}", "")
    if code != migrated.code:
        # What the functions read.
        code = code.replace("import functools\n", "").replace("import numpy\n", "")
    assert code == (old if new is None else new)
    assert migrated.marked == 0
    assert migrate(migrated.code).code == migrated.code


MARKED = {
    "refused": ("from jax.experimental.maps import xmap\nf = xmap(abs)\n", "jax.shard_map", 2),
    "no one name of today": ("import jax\nx = jax.util.safe_map(f, y)\n", "zip(xs, ys", 2),
    "the mesh assigned": (
        "import jax\ndef f():\n    jax.experimental.maps.thread_resources.env = x\n",
        "with mesh:",
        3,
    ),
    "a flag turned off": (
        "import jax\njax.config.update('jax_array', False)\n",
        "is always on",
        2,
    ),
    "the name of a primitive": (
        "import jax.core\nx = jax.core.Jaxpr, {'pjit': 1}\n",
        'is named "jit"',
        2,
    ),
    "the name of an attribute": (
        "import jax\nx = hasattr(x, 'device_buffer')\n",
        "x.addressable_data(0)",
        2,
    ),
    "a held constructor": (
        "from jax.experimental.global_device_array import GlobalDeviceArray\n"
        "x = make(GlobalDeviceArray)\n",
        "no constructors",
        2,
    ),
    "all names": ("from jax.experimental.maps import *\n", "import the names", 1),
    "imported alone": ("from jax.experimental.maps import xmap\n", "jax.shard_map", 1),
    "passed on": ("from jax.experimental.pjit import pjit\n", "another file", 1),
    "FROM_GDA elsewhere": (
        "from jax.experimental.pjit import FROM_GDA\nx = [FROM_GDA]\n",
        "in in_shardings",
        1,
    ),
}


@pytest.mark.parametrize(("old", "advice", "line"), MARKED.values(), ids=MARKED)
def test_line_for_manual_migration_has_a_comment_above(old: str, advice: str, line: int) -> None:
    migrated = migrate(old)
    marks = [
        text for text in migrated.code.splitlines() if text.lstrip().startswith("# xlashard: ")
    ]
    assert len(marks) == migrated.marked == 1
    assert advice in marks[0]


def test_every_legacy_name_has_a_migration_rule_or_stays() -> None:
    without = {
        name
        for name, entry in entries().items()
        if rule_of(name) is None and not entry.stays and not name.startswith("jax.Array.")
    }
    assert without == set()
    assert isinstance(rule_of("jax.experimental.maps.xmap"), Mark)
    assert rule_of("jax.linear_util") == Module("jax.extend.linear_util")
    assert rule_of("jax.pxla.Mesh") == Rename("jax.sharding.Mesh")
    assert canonical("jax.pxla") == "jax.interpreters.pxla"
    assert rule_of("jax.sharding.Mesh") is rule_of("jax.tree.map") is None
