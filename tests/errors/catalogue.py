"""The catalogue of mistakes, as data: one `.toml` file in `mistakes/` for each topic.

title = "Shardings and their arguments"
about = "One or two sentences that stand under the title."
setup = '''...'''                # runs after `SETUP`, before each call of this topic

[[mistake]]
title = "A spec with an axis that the mesh lacks"
error = "ResourceError"          # the class, of `xlashard.errors` or a built-in one
wrong = '''...'''                # the mistake; runs after `SETUP`
right = '''...'''                # the correction
path = "state['w']"              # the place that the message must name, where there is one
facts = ["'x'=4", "8 tiles"]     # numbers and names that must stand in it
fix = "PartitionSpec(None, 'y')" # the replacement that it must show

jax = '''...'''                  # the same mistake with JAX alone; left out if the text is the
                                 # same, which then runs after `JAX_SETUP`
no_jax = "why"                   # JAX has no counterpart, and why
jax_path = "argument w of f"     # how JAX writes the same place, if it names it
jax_facts = ["(4,)"]             # how JAX writes the same facts, one for each of ours
jax_fix = "jax.set_mesh"         # what JAX shows to write instead, if anything
jax_is_as_good = true            # JAX's message has all that ours must have
"""

import re
import textwrap
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

FOLDER = Path(__file__).parent / "mistakes"
WIDTH = 96
# The release of JAX whose messages the `jax_*` fields describe.
JAX_VERSION = "0.12.0.1"

COMMON = """\
import jax
import jax.numpy as jnp
import numpy as np
"""

SETUP = f"""\
{COMMON}from xlashard import (
    AUTO, UNSPECIFIED, Array, GSPMDSharding, Mesh, NamedSharding, P, Sharding,
    SingleDeviceSharding, compile_stablehlo, device_get, device_put, from_dlpack,
    make_array_from_callback, make_array_from_process_local_data,
    make_array_from_single_device_arrays, pjit, with_sharding_constraint,
)
from xlashard.multihost import (
    broadcast_one_to_all, global_array_to_host_local_array, host_local_array_to_global_array,
    process_allgather,
)
import xlashard.numpy as xnp
"""

JAX_SETUP = f"""\
{COMMON}from jax import (
    Array, device_get, device_put, jit as pjit, make_array_from_callback,
    make_array_from_process_local_data, make_array_from_single_device_arrays,
)
from jax.dlpack import from_dlpack
from jax.experimental.multihost_utils import (
    broadcast_one_to_all, global_array_to_host_local_array, host_local_array_to_global_array,
    process_allgather,
)
from jax import numpy as xnp
from jax.lax import with_sharding_constraint
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, Sharding, SingleDeviceSharding
"""

DEVICES = """\
devices = jax.devices()
mesh = Mesh(np.array(devices).reshape(4, 2), ("x", "y"))
rows, columns = NamedSharding(mesh, P("x")), NamedSharding(mesh, P(None, "x"))
"""

VALUES = """\
state = {"w": np.ones((8, 4), np.float32), "b": np.ones(4, np.float32)}
batch = np.ones((8, 8), np.float32)

def step(state, batch):
    return jax.tree.map(lambda leaf: leaf * 2, state), batch + 1
"""

SHARED = f"{DEVICES}\n{VALUES}"


def names_devices(source: str) -> bool:
    """Return True for a source that needs the eight devices of the setup, or names made of them."""
    return re.search(r"\b(devices|\w*mesh|rows|columns)\b", source) is not None


@dataclass(frozen=True)
class Mistake:
    """Mistake of a topic; the module docstring describes the fields."""

    title: str
    error: str
    wrong: str
    right: str
    fix: str
    path: str = ""
    facts: tuple[str, ...] = ()
    jax: str = ""
    no_jax: str = ""
    jax_path: str = ""
    jax_facts: tuple[str, ...] = ()
    jax_fix: str = ""
    jax_is_as_good: bool = False
    setup: str = ""

    @property
    def slug(self) -> str:
        """Return the anchor of its heading, which is also its name among the tests."""
        kept = "".join(c for c in self.title.lower() if c.isalnum() or c in " -_")
        return kept.replace(" ", "-")


@dataclass(frozen=True)
class Topic:
    """File of mistakes.

    Attributes:
        name: Name of the file, without its suffix.
        title: The heading.
        about: Text under the heading.
        setup: Code that runs before each of its calls.
        mistakes: Mistakes in the order of the page.
    """

    name: str
    title: str
    about: str
    setup: str
    mistakes: tuple[Mistake, ...]


# In the order of the page.
TOPICS = (
    "mesh",
    "fit",
    "padding",
    "prefixes",
    "options",
    "arguments",
    "places",
    "donation",
    "constraint",
    "explicit",
    "stages",
    "state_shapes",
    "safetensors",
    "saving",
    "steps",
    "transformations",
    "report",
    "hlo",
    "pictures",
    "shardings",
    "unreduced",
    "parsing",
    "constructors",
    "pmap",
    "legacy",
    "legacy_worlds",
    "legacy_gda",
    "legacy_surface",
    "legacy_saving",
    "process_local",
    "data_loading",
    "multihost",
    "pods",
    "moving",
    "reading",
    "dlpack",
    "functions",
    "modules",
    "tpu",
    "gpu",
    "sweep",
    "auto",
    "testing",
    "environment",
)


def read_topics() -> tuple[Topic, ...]:
    """Return all mistakes, by topic.

    Raises:
        ValueError: If a file is not on the list, or an entry has fields that it can't have.
    """
    found = {path.stem for path in FOLDER.glob("*.toml")}
    if found != set(TOPICS):
        raise ValueError(f"TOPICS and the files in {FOLDER} differ: {found ^ set(TOPICS)}")
    return tuple(_read_topic(FOLDER / f"{name}.toml") for name in TOPICS)


def wrapped(text: str) -> str:
    """Wrap each line of a text at `WIDTH`, indented like its first part."""
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines += textwrap.wrap(
            line,
            WIDTH,
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            drop_whitespace=True,
        ) or [""]
    return "\n".join(lines)


def _read_topic(path: Path) -> Topic:
    data = tomllib.loads(path.read_text(encoding="utf-8"))
    setup = data.get("setup", "")
    mistakes = tuple(_mistake(path.stem, {**each, "setup": setup}) for each in data["mistake"])
    return Topic(path.stem, data["title"], data["about"], setup, mistakes)


def _mistake(topic: str, entry: dict[str, object]) -> Mistake:
    where = f"{topic}: {entry.get('title')!r}"
    unknown = set(entry) - {field.name for field in fields(Mistake)}
    if unknown:
        raise ValueError(f"{where} has the unknown fields {sorted(unknown)}")
    values = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    try:
        made = Mistake(**values)  # pyright: ignore[reportArgumentType]
    except TypeError as error:
        raise ValueError(f"{where}: {error}") from None
    if made.jax and made.no_jax:
        raise ValueError(f"{where} has both jax and no_jax: remove one of them")
    if made.jax_facts and len(made.jax_facts) != len(made.facts):
        raise ValueError(f"{where}: give jax_facts one entry for each of facts")
    return made
