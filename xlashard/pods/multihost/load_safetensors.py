"""`load_safetensors`: arrays of files of safetensors, on shardings."""

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from xlashard._jax.trace import tracing
from xlashard.core.array.constructors import make_array_from_callback
from xlashard.core.pjit.shardings.device_assignment import find_spec_mesh
from xlashard.core.pjit.shardings.path_rules import (
    is_path_rules,
    read_path_rules,
    read_sharding,
)
from xlashard.core.pjit.shardings.resolve import fit_sharding
from xlashard.core.pjit.shardings.resources import expand, read_resources
from xlashard.core.sharding import XLACompatibleSharding
from xlashard.errors import ArgumentError, counted
from xlashard.pods.multihost.safetensors_files import SafetensorsFiles, StoredArray
from xlashard.support.tracebacks import short_tracebacks


def load_safetensors(
    path: str | os.PathLike[str], shardings: Any, *, dtype: Any = None
) -> dict[str, Any]:
    """Load arrays of safetensors onto shardings; each process reads the bytes of its devices.

    A shard is read once for the devices of a process that hold it, by its own bytes (of rows with
    less than 4 KiB between them, with those). No whole array is held, unless its sharding is whole.

    Args:
        path: A file, an index (`model.safetensors.index.json`), or a folder with an index or files.
        shardings: None (replicated), a PartitionSpec or a Sharding for all arrays, a dict of them
            by name, or rules: a list of pairs of a regular expression and such a sharding, of
            which the first that `re.search` finds in a name holds. Specs are on the mesh in force.
        dtype: Dtype of the floating-point arrays; None keeps theirs.

    Returns:
        The `Array`s by name.

    Raises:
        ArgumentError: The files are missing or invalid, or no rule matches an array.
        ResourceError: A sharding is invalid or does not fit its array.
        MeshError: A spec, without a mesh in force.

    Example:
        >>> import json, tempfile, jax, numpy as np
        >>> from pathlib import Path
        >>> import xlashard as xs
        >>> header = {"w": {"dtype": "F32", "shape": [8, 2], "data_offsets": [0, 64]}}
        >>> text = json.dumps(header).encode()
        >>> file = Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> data = np.arange(16, dtype=np.float32).tobytes()
        >>> _ = file.write_bytes(len(text).to_bytes(8, "little") + text + data)
        >>> mesh = xs.Mesh(np.array(jax.devices()[:1]), ("data",))
        >>> with jax.set_mesh(mesh):
        ...     weights = xs.load_safetensors(file, [("w$", xs.P("data"))], dtype="bfloat16")
        >>> weights["w"].dtype, weights["w"].sharding.spec
        (dtype(bfloat16), P('data',))
    """
    with short_tracebacks:
        arrays = SafetensorsFiles.open(path, "path").arrays
        requested = _read_dtype(dtype)
        types = {
            name: jax.ShapeDtypeStruct(
                stored.shape,
                stored.dtype if requested is None or not _is_float(stored) else requested,
            )
            for name, stored in arrays.items()
        }
        places = _find_shardings(types, shardings)
        return {name: _load(arrays[name], types[name], places[name]) for name in arrays}


def _is_float(stored: StoredArray) -> bool:
    return jnp.issubdtype(stored.dtype, jnp.floating)


def _read_dtype(dtype: Any) -> np.dtype | None:
    try:
        requested = None if dtype is None else np.dtype(dtype)
    except TypeError:
        requested = np.dtype(object)
    if requested is None or jnp.issubdtype(requested, jnp.floating):
        return requested
    raise ArgumentError(
        f"dtype of load_safetensors is {dtype!r}: write a floating-point dtype such as "
        "jnp.bfloat16, or leave it out to keep those of the file"
    )


def _find_shardings(types: dict[str, Any], requested: Any) -> dict[str, XLACompatibleSharding]:
    mesh = find_spec_mesh(tracing.mesh_in_force())
    if is_path_rules(requested):
        shardings = read_path_rules(requested, "shardings").find_shardings(types, mesh, "array")
        missing = [name for name in types if name not in shardings]
        if missing:
            raise ArgumentError(
                f"shardings has no rule for {counted(len(missing), 'array')} of {len(types)}, such "
                f"as {missing[0]!r}: write one, or a last rule ('', P()) to replicate the rest"
            )
        return shardings
    tree = read_resources(requested, "shardings")
    leaves = expand(tree, jax.tree.structure(types), "path")
    shardings = {}
    # Trees of dicts are sorted by key.
    for name, resource in zip(sorted(types), leaves, strict=True):
        value = "shardings", name, types[name]
        sharding = read_sharding(resource, mesh, value)
        if sharding is None:
            raise ArgumentError(
                f"shardings of {name} is UNSPECIFIED, AUTO or FROM_GDA, which a program resolves: "
                "write P(...) or a Sharding"
            )
        shardings[name] = fit_sharding(sharding, value, (), None)
    return shardings


def _load(stored: StoredArray, expected: Any, sharding: XLACompatibleSharding) -> Any:
    def read(index: tuple[slice, ...]) -> np.ndarray:
        ranges = zip(index, stored.shape, strict=True)
        box = tuple(part.indices(size)[:2] for part, size in ranges)
        return stored.read(box).astype(expected.dtype, copy=False)

    return make_array_from_callback(stored.shape, sharding, read, dtype=expected.dtype)
