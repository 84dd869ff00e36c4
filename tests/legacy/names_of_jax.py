"""Run in its own process: changes of JAX's names by xlashard, and by installing the era's names.

Prints its findings as JSON, which `test_installing.py` checks.
"""

import importlib
import json
import sys
from types import ModuleType

import jax


def modules() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in ("jax", "jaxlib") and isinstance(module, ModuleType)
    }


def names() -> dict[str, set[str]]:
    """Return the names in each module of JAX, without those of modules loaded meanwhile."""
    return {
        name: {key for key in dir(module) if f"{name}.{key}" not in sys.modules}
        for name, module in modules().items()
    }


def values() -> dict[str, dict[str, object]]:
    there = {name: dict(vars(module)) for name, module in modules().items()}
    there["the table of modules"] = dict(modules())
    there["config"] = {name: getattr(jax.config, name) for name in dir(jax.config)}
    for kind in (type(jax.config), jax.Array, jax.Device, type(jax.numpy.ones(()))):
        there[str(kind)] = dict(vars(kind))
    return there


def differences(before: dict, after: dict, *, whole: bool) -> list[str]:
    """Return changes of `after` in modules that `before` has; by value where it is whole."""
    changed = [] if not whole else sorted(before.keys() ^ after.keys())
    for place in before.keys() & after.keys():
        old, new = before[place], after[place]
        changed += [f"{place}: {key}" for key in sorted(set(old) ^ set(new))]
        if whole:
            changed += [
                f"{place}: {k} is another" for k in old.keys() & new if old[k] is not new[k]
            ]
    return changed


def bound_methods_left_out(changed: list[str]) -> list[str]:
    # Each access to an object's method makes a new one.
    return [line for line in changed if not line.startswith("config: ") or "another" not in line]


jax.numpy.ones(3).block_until_ready()  # JAX's own initialisation at its first computation
for name in ("jax.experimental.multihost_utils", "jax.experimental.pjit", "jax.extend.core"):
    importlib.import_module(name)
before = names()

with_xlashard = names()
# The class of arrays registers itself, and stays registered.
from xlashard.legacy import GlobalDeviceArray as GlobalDeviceArray  # noqa: E402
from xlashard.legacy import installer as installing  # noqa: E402

with_legacy = names()
bare = values()
installing.uninstall()  # nothing is installed
installing.install()
here = values()
installing.install()
again = values()
imported = importlib.import_module("jax.linear_util")
asked = [
    jax.tree_map,
    imported.wrap_init,
    importlib.import_module("jax.lib").xla_bridge.get_backend,
    "tree_map" in dir(jax),
    hasattr(jax, "linear_util"),
]
installing.uninstall()
installing.uninstall()
after = values()

installing.install()
# A module of JAX that is loaded meanwhile works with today's modules, and has them afterwards.
late = ModuleType("jax.experimental.late")
sys.modules[late.__name__] = late
exec("from jax.experimental import multihost_utils", vars(late))
while_there = eval("multihost_utils.sync_global_devices", vars(late))
patched = importlib.import_module("jax.ad_checkpoint")
patched_there = "checkpoint" in dir(patched) and callable(patched.checkpoint)
replaced = importlib.import_module("jax.experimental.array_serialization.serialization")
installing.uninstall()
today = importlib.import_module(replaced.__name__)

print(
    json.dumps(
        {
            "by xlashard": differences(before, with_xlashard, whole=False),
            "by xlashard.legacy": differences(before, with_legacy, whole=False),
            "installed": differences(bare, here, whole=False),
            "twice": bound_methods_left_out(differences(here, again, whole=True)),
            "after": bound_methods_left_out(differences(bare, after, whole=True)),
            "asked": [bool(changed) for changed in asked],
            "still works": [imported.wrap_init(abs).call_wrapped(-3), asked[0](abs, [-3])],
            "late modules": [
                late.multihost_utils is sys.modules["jax.experimental.multihost_utils"],
                while_there is late.multihost_utils.sync_global_devices,
                patched_there,
                not hasattr(patched, "checkpoint"),
                today.__file__.startswith(jax.__path__[0]),
                today is jax.experimental.array_serialization.serialization,
                today is not replaced,
                today.__spec__.loader is today.__loader__,
            ],
        }
    )
)
