"""JAX is the same after `import xlashard`, and after arrays and programs, but for a few names."""

import json
import subprocess

import pytest

from tests.fork_server import python_command
from tests.predict.targets.gpu.plugin import needs_plugin

INSTALLED = {
    # Arrays that are not of JAX's own class would pass these unchecked, ...
    "jax._src.interpreters.pxla.check_array_xla_sharding_layout_match",
    # lose their sharding in these, ...
    "jax._src.dispatch._device_put_impl",
    *("jax.lax.full", "jax._src.lax.lax.full"),
    # be refused by this one, ...
    "jax.make_array_from_single_device_arrays",
    # and be local data of this process for these: they test for the class of JAX's own arrays, and
    # read others by NumPy's protocol, which knows nothing of other processes.
    "jax.experimental.multihost_utils._handle_array_process_allgather",
    "jax.experimental.multihost_utils.assert_equal",
    # It raises without the name of a closed-over array.
    "jax._src.interpreters.mlir._constant_handlers.[<class 'jaxlib._jax.ArrayImpl'>]",
    # Programs of this package check their results, and don't run under the last one.
    *(
        f"{module}.{name}._update_{scope}_hook"
        for module in ("jax", "jax._src.config")
        for name in ("debug_nans", "debug_infs", "no_execution")
        for scope in ("global", "thread_local")
    ),
}
"""Functions of JAX that stay replaced once arrays are registered with it."""

LISTENERS = "jax._src.monitoring._event_listeners"
"""The list that has a listener to the persistent cache from then on."""

BEFORE = """
import json
import jax
import jax.experimental.multihost_utils
from jax._src.cudnn import fused_attention_stablehlo
from tests.jax_state import JaxState
before = JaxState()
"""
PRINT = """
print(json.dumps([sorted(before.replaced()), sorted(before.added())]))
"""


def changes(code: str) -> tuple[set[str], set[str]]:
    """Run code in a process that has imported JAX.

    Returns:
        The names that it replaced, and the listeners, handlers and filters that it added.
    """
    command = [*python_command(), "-c", BEFORE + code + PRINT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    replaced, added = json.loads(done.stdout.splitlines()[-1])
    return set(replaced), {name for name in added if "listeners" in name or "log" in name}


IMPORT = """
import sys
import xlashard
assert not any(name.startswith("xlashard._jax") for name in sys.modules), sys.modules.keys()
from xlashard import errors, geometry, hlo, tpu
hlo.read("HloModule m\\n\\nENTRY %e {\\n  ROOT %c = s32[] constant(1)\\n}\\n")
assert not any(name.startswith("xlashard._jax") for name in sys.modules), sys.modules.keys()
"""
EVERY_NAME = """
import xlashard
[getattr(xlashard, name) for name in dir(xlashard)]
"""
USE = """
import numpy as np
import xlashard as xs
mesh = xs.Mesh(np.array(jax.devices()), ("x",))
x = xs.device_put(np.ones((8, 8), np.float32), xs.NamedSharding(mesh, xs.P("x")))
double, triple = xs.pjit(lambda x: 2 * x), jax.jit(lambda x: 3 * x)
double(x), triple(x), xs.explain(double, x), xs.explain(triple, x)
xs.explain_recompile(double), xs.explain_recompile(triple)
"""
WATCH = """
step = jax.jit(lambda x: 5 * x)
with xs.watch() as first, xs.watch():
    first.close()
    inside = before.replaced()
    step(np.ones(3))
assert {"jax._src.pjit._infer_params", "jax._src.pjit._run_python_pjit"} <= inside
step(np.ones(4))
assert len(xs.explain_recompile(step).explanations) == 1
"""
CUDNN = """
from concurrent.futures import ThreadPoolExecutor
from xlashard._jax.trace.target_chip import assume_chip
from xlashard.gpu import topology
gpu = topology("h100-8").devices[0]
try:
    with assume_chip(gpu), assume_chip(gpu, all_threads=True):
        assert fused_attention_stablehlo.check_cudnn_version() > 90000
    with assume_chip(gpu), ThreadPoolExecutor() as others:
        check = others.submit(fused_attention_stablehlo.check_compute_capability, "8.0")
        assert not check.result()  # another thread's programs are for its own devices
    with assume_chip(gpu), assume_chip(gpu, in_kernels=True, all_threads=True):
        assert jax.sharding.get_abstract_mesh().abstract_device.platform == "gpu"
        assert fused_attention_stablehlo.check_compute_capability("9.0")
        assert not fused_attention_stablehlo.check_compute_capability("10.0")
        raise KeyError
except KeyError:
    pass
"""
UNWATCHED = (
    USE
    + """
for step in (double, triple):
    xs.preflight(step, x, topology="v5e-8", estimate=True), xs.auto_shard(step, x, mesh=mesh)
with xs.record_programs() as programs:
    triple(x)
watched = {"jax._src.pjit." + name for name in ("_infer_params", "_run_python_pjit")}
assert not watched & before.replaced(), "replaced without a watch"
"""
)
BACKENDS = """
from xlashard._jax.runtime.topologies import quiet_backends
with quiet_backends():
    assert "jax._src.xla_bridge.discover_pjrt_plugins" in before.replaced()
    jax.devices()
"""


@pytest.mark.integration
def test_import_changes_nothing_in_jax() -> None:
    assert changes(IMPORT) == (set(), set())


@pytest.mark.integration
@pytest.mark.parametrize(
    "code",
    [
        pytest.param(EVERY_NAME, id="every public name"),
        pytest.param(USE, id="arrays and programs"),
        pytest.param(UNWATCHED, id="reports"),
        pytest.param(USE + WATCH, id="watched functions of jax.jit"),
        pytest.param(BACKENDS + USE, id="quiet start of backends"),
        pytest.param(USE + CUDNN, id="cuDNN", marks=needs_plugin),
    ],
)
def test_use_replaces_nothing_else_in_jax(code: str) -> None:
    replaced, added = changes(code)
    assert replaced == INSTALLED
    assert added == {LISTENERS}
