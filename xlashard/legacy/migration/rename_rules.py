"""Rules for rewriting each removed name, derived from its entry."""

import re
from dataclasses import dataclass
from functools import lru_cache

from xlashard.legacy.modules import Entry, entries, entries_by_module


@dataclass(frozen=True)
class Rename:
    """Rule that replaces a name by today's name.

    Attributes:
        to: Today's full name.
        inline: True to replace uses and drop the import; False to rewrite the import only.
    """

    to: str
    inline: bool = False


@dataclass(frozen=True)
class Expression:
    """Rule that replaces a name by an expression and drops its import.

    Attributes:
        code: The expression.
    """

    code: str


@dataclass(frozen=True)
class Module:
    """Rule that replaces a module and keeps its local name.

    Attributes:
        to: The full name of today's module.
    """

    to: str


@dataclass(frozen=True)
class Helper:
    """Rule that replaces a function by a helper inserted into the program.

    Attributes:
        name: The name of the helper.
    """

    name: str


@dataclass(frozen=True)
class Mark:
    """Rule that adds a comment, for names that need a manual change.

    Attributes:
        text: The comment.
    """

    text: str


type Rule = Rename | Expression | Module | Helper | Mark

PJIT = "jax.experimental.pjit.pjit"
GDA = "jax.experimental.global_device_array.GlobalDeviceArray"
ENV = "jax.experimental.maps.thread_resources.env"
SERIALIZATION = "jax.experimental.array_serialization.serialization"

_ALIASES = {
    "jax.pxla": "jax.interpreters.pxla",
    "jax.xla": "jax.interpreters.xla",
    "jax.interpreters.pxla.thread_resources": "jax.experimental.maps.thread_resources",
    "jax.interpreters.pxla.ResourceEnv": "jax.experimental.maps.ResourceEnv",
}
_MESH_IN_FORCE = "jax.sharding.get_abstract_mesh()"
_OWN: dict[str, Rule] = {
    PJIT: Rename("jax.jit", inline=True),
    "jax.experimental.pjit.with_sharding_constraint": Rename("jax.lax.with_sharding_constraint"),
    "jax.experimental.pjit.FROM_GDA": Expression("None"),
    "jax.experimental.pjit.REPLICATED": Expression("jax.P()"),
    GDA: Rename("jax.Array", inline=True),
    "jax.experimental.global_device_array.Shard": Rename("jax.Shard"),
    "jax.experimental.maps.mesh": Rename("jax.sharding.Mesh", inline=True),
    ENV: Expression(_MESH_IN_FORCE),
    f"{ENV}.physical_mesh": Expression(_MESH_IN_FORCE),
    f"{ENV}.physical_mesh.devices": Expression("jax.sharding.get_mesh().devices"),
    f"{ENV}.physical_mesh.local_mesh": Expression("jax.sharding.get_mesh().local_mesh"),
    "jax.config.jax_array": Expression("True"),
    "jax.config.jax_parallel_functions_output_gda": Expression("False"),
    "jax.core.ClosedJaxpr": Rename("jax.extend.core.ClosedJaxpr"),
    "jax.experimental.host_callback.barrier_wait": Rename("jax.effects_barrier", inline=True),
    "jax.interpreters.sharded_jit.PartitionSpec": Rename("jax.P"),
}
_OWN.update(
    (name, Helper(f"_{helper}"))
    for name, helper in {
        f"{GDA}.from_batched_callback": "array_from_batched_callback",
        f"{GDA}.from_batched_callback_with_devices": "array_from_batched_callback_with_devices",
        "jax.device_put_replicated": "device_put_replicated",
        "jax.device_put_sharded": "device_put_sharded",
        "jax.experimental.host_callback.id_tap": "id_tap",
        "jax.experimental.host_callback.call": "call_host",
        "jax.experimental.gda_serialization.serialization._get_metadata": "get_metadata",
        f"{SERIALIZATION}._get_metadata": "get_metadata",
        "jax.experimental.gda_serialization.serialization._spec_has_metadata": "spec_has_metadata",
    }.items()
)
_CLASSES = {"MeshPspecSharding": "jax.sharding.NamedSharding"}
_DOTTED = re.compile(r"[A-Za-z_]\w*(\.\w+)+")
_CALLED = re.compile(r"(jax[\w.]+)\(\)")
_IMPORT = re.compile(r"import ([\w.]+)|from ([\w.]+) import (\w+)")
_TYPES = ("jax.Array", "jax.P", "jax.sharding.Sharding", "jax.sharding.NamedSharding")


def canonical(name: str) -> str:
    """Return the canonical form of a name, such as `jax.interpreters.pxla` for `jax.pxla`.

    Args:
        name: A full name.
    """
    for alias, known in _ALIASES.items():
        if name == alias or name.startswith(f"{alias}."):
            name = known + name[len(alias) :]
    return name.replace("jax.config.config.", "jax.config.")


@lru_cache(maxsize=4096)
def rule_of(name: str) -> Rule | None:
    """Return the rule for a full name; None to keep the name.

    Args:
        name: The name, such as `jax.experimental.maps.Mesh`.
    """
    known = canonical(name)
    if known in _OWN:
        return _OWN[known]
    last = name.rpartition(".")[2]
    if last in _CLASSES and known in entries():
        return Rename(_CLASSES[last], inline=last != _CLASSES[last].rpartition(".")[2])
    entry = entries().get(known) or entries().get(name)
    if entry is None or entry.stays or name.startswith("jax.Array."):
        return None
    return _rule_of_entry(entry, last)


def _rule_of_entry(entry: Entry, last: str) -> Rule:
    today = entry.today
    if entry.treatment == "refused":
        return _mark(entry)
    if match := _IMPORT.fullmatch(today):
        return Module(match[1] or f"{match[2]}.{match[3]}")
    if entry.is_module:
        return Module(today) if today == "jax.core" else _mark(entry)
    if today.startswith("xlashard"):
        return _mark(entry)
    if today.startswith("tuple["):
        return Expression(today)
    if match := _CALLED.fullmatch(today):
        today = match[1]
    same = today.rpartition(".")[2] in (last, last.removeprefix("tree_"))
    if not _DOTTED.fullmatch(today) or not (same or today in _TYPES or _is_drop_in(entry)):
        return _mark(entry)
    return Rename(today, inline=today != "jax.P" and today.rpartition(".")[2] != last)


def _is_drop_in(entry: Entry) -> bool:
    return entry in entries_by_module()["numpy"] or entry.today in ("jax.tree.map", "jax.typeof")


def _mark(entry: Entry) -> Mark:
    why = f" ({entry.note.rstrip('.')})" if entry.treatment == "refused" else ""
    return Mark(f"{entry.name} was removed in JAX {entry.gone}{why}. Write: {entry.today}")
