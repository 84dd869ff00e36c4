"""The era's meshes and type arithmetic in each of two processes, and a whole program."""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from tests.fork_server import python_command
from tests.legacy.removed import maps, pjit
from xlashard import NamedSharding, legacy
from xlashard.errors import BoxError
from xlashard.legacy.shardings.partition_spec import PartitionSpec as P


@pytest.mark.integration
@pytest.mark.pod(processes=2, devices=2)
def test_local_mesh_and_local_avals_of_each_process() -> None:
    devices = np.array(jax.devices()).reshape(2, 2)
    mesh = maps.Mesh(devices, ("x", "y"))
    assert mesh.is_multi_process and mesh.local_mesh.shape == {"x": 1, "y": 2}
    assert mesh.local_devices == list(devices[jax.process_index()])
    with mesh:
        env = maps.thread_resources.env
        assert env.shape == {"x": 2, "y": 2} and env.local_shape == {"x": 1, "y": 2}
    fake = maps.Mesh(np.array([[{"process": n}, {"process": n}] for n in range(2)]), ("x", "y"))
    assert fake.shape == mesh.shape

    local, whole = (jax.core.ShapedArray((n, 4), np.float32) for n in (4, 8))
    semantics = maps._PositionalSemantics
    kinds = [semantics.LOCAL, semantics.GLOBAL, semantics.LOCAL, semantics.LOCAL]
    specs = (P("x"), P("x"), P(), P("y"))
    named = [NamedSharding(mesh, spec) for spec in specs]
    bare = [pjit.to_op_sharding_sharding(sharding, 2) for sharding in named]
    for shardings in (named, bare):
        assert pjit.local_to_global(kinds, [local] * 4, shardings, mesh) == [local] * 4
        with legacy.jax_array(False):
            scaled = pjit.local_to_global(kinds, [local] * 4, shardings, mesh)
            assert [aval.shape[0] for aval in scaled] == [8, 4, 4, 4]
            back = pjit.global_to_local(kinds, [whole] * 4, shardings, mesh)
            assert [aval.shape[0] for aval in back] == [4, 8, 8, 8]
            assert pjit.global_to_local(semantics.LOCAL, [whole], named[:1], mesh)[0].shape == (
                4,
                4,
            )
    with legacy.installed():
        mapping = pjit.get_array_mapping(P("x"))
        assert mesh._local_to_global(mapping, local).shape == (8, 4)
        assert mesh._global_to_local(mapping, whole).shape == (4, 4)

    across = maps.Mesh(devices.T.reshape(4), ("x",))
    with (
        pytest.raises(BoxError, match="global_mesh"),
        legacy.jax_array(False),
    ):
        shardings = [NamedSharding(across, P("x"))]
        pjit.local_to_global(semantics.LOCAL, [local], shardings, across)
    assert not maps.Mesh(devices[:, :1], ("x", "y")).empty


@pytest.mark.integration
def test_program_that_uses_jax_internals_runs_unchanged() -> None:
    here = Path(__file__)
    environment = {**os.environ, "PYTHONPATH": str(here.parents[3])}
    words = ["-m", "xlashard.legacy", str(here.with_name("reaching_inside.py"))]
    done = subprocess.run(
        [*python_command(environment), *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert "reached inside; jax.experimental.maps.xmap was removed" in done.stdout
    assert "jax.shard_map(f, mesh=mesh" in done.stdout
