"""Migrated programs print on plain JAX what the old ones print with the removed names installed."""

import contextlib
import io

import pytest

from tests.without_jax import HAS_JAX
from xlashard.legacy.migration import migrate

if HAS_JAX:
    from xlashard.legacy import installer

pytestmark = pytest.mark.needs_jax

HEAD = """\
import contextlib, functools
import jax, jax.numpy as jnp, numpy as np
from jax.experimental import PartitionSpec as P, maps
from jax.experimental.maps import Mesh
from jax.experimental.pjit import pjit, with_sharding_constraint, FROM_GDA
from jax.experimental import global_device_array as gda_lib
from jax.experimental.global_device_array import GlobalDeviceArray as GDA
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ('d', 'm'))
X = np.arange(64, dtype=np.float32).reshape(8, 8)
def double(x): return x * 2
"""
SAME = {
    # Arrays that are made while a mesh is in force.
    "a batch": """
f = pjit(double, in_axis_resources=P('d'), out_axis_resources=None)
with mesh: print(f(jnp.asarray(X)).sum(), len(jnp.ones(3).devices()))
""",
    "a state of a jitted function": """
f = pjit(lambda s, x: (s + x.sum(), x.mean()), (P('d'), P('m')), (P('d'), None), donate_argnums=0)
with mesh:
    s = jax.jit(jnp.zeros, static_argnums=0)(8)
    for _ in range(2): s, loss = f(s, X)
print(s[0], loss)
""",
    "a constraint on a new array": """
with mesh: print(with_sharding_constraint(jnp.ones(8), P('d')).sharding.spec)
""",
    # Files.
    "arrays read on meshes and axes, or on shardings": """
import tempfile
from jax.experimental.gda_serialization import serialization
specs = [serialization.get_tensorstore_spec(tempfile.mkdtemp() + name) for name in '/a /b'.split()]
serialization.run_serialization([jax.device_put(X), jax.device_put(X[0])], specs)
for x in serialization.run_deserialization([mesh, mesh], [P('d'), P()], specs):
    print(x.shape, x.sharding.spec, x.sum())
shardings = [jax.sharding.NamedSharding(mesh, P('m'))] * 2
for x in serialization.run_deserialization(shardings, specs): print(x.sharding.spec, x.sum())
""",
    # Meshes.
    "a fresh mesh for each call": """
f = pjit(double, in_axis_resources=P('d'), out_axis_resources=P('m'))
for shape in ((4, 2), (2, 4)):
    with Mesh(np.array(jax.devices()).reshape(shape), ('d', 'm')) as own: y = f(X)
    print(y.sharding.mesh.shape, y.sharding.spec, own.size)
""",
    "a mesh or nullcontext": """
for parallel in (False, True):
    with mesh if parallel else contextlib.nullcontext(): print(jax.jit(double)(X).sum())
""",
    "meshes entered by calls": """
f = pjit(double, in_axis_resources=P('d'), out_axis_resources=None)
with contextlib.ExitStack() as stack:
    stack.enter_context(mesh)
    print(f(X).sum())
mesh.__enter__()
print(f(X).sum())
mesh.__exit__(None, None, None)
print(maps.thread_resources.env.physical_mesh.empty)
""",
    "a mesh as a decorator": """
@mesh
def run(x): return pjit(double, in_axis_resources=P('d'), out_axis_resources=P('d'))(x)
print(run(X).sharding.spec)
""",
    "a mesh inside of functions that are traced": """
def g(x):
    with mesh: return with_sharding_constraint(x, axis_resources=P('d')) * 2
f = pjit(g, in_axis_resources=P('d'), out_axis_resources=P('d'))
def h(x):
    with mesh: return f(x).sum()
print(jax.jit(g)(X).sum(), jax.eval_shape(h, X).shape, jax.grad(h)(X).sum(), jax.jit(h)(X))
""",
    "the mesh in force": """
env = maps.thread_resources.env
def constrain(x, s):
    physical = maps.thread_resources.env.physical_mesh
    return x if physical.empty else with_sharding_constraint(x, s)
print(constrain(X, P('d')).sum(), env.physical_mesh.devices.shape == (), env.shape)
with mesh:
    print(jax.jit(lambda x: constrain(x, P('d')))(X).sharding.spec)
    print(maps.thread_resources.env.physical_mesh.devices.shape, maps.thread_resources.env.shape)
""",
    "no mesh": "print(pjit(double, in_axis_resources=None, out_axis_resources=None)(X).sum())",
    "no resources": """
y = GDA.from_callback((8, 8), mesh, P('d'), lambda i: X[i])
with mesh: print(pjit(double)(X).sum(), pjit(lambda x: x.sum(), FROM_GDA, None)(y))
""",
    # Held functions.
    "a pjit in a parameter": """
def build(wrap): return wrap(double, in_axis_resources=P('d'), out_axis_resources=None)
with mesh: print(build(pjit)(X).sum(), build(lambda f, **_: f)(X).sum())
""",
    "a pjit in attributes and containers": """
class Trainer:
    jit = staticmethod(pjit)
    def __init__(self): self.f = self.jit(double, in_axis_resources=P('d'), out_axis_resources=None)
wraps = {'pjit': pjit, 'none': None}
with mesh: print(Trainer().f(X).sum(), wraps['pjit'](double, None, P('d'))(X).sharding.spec)
""",
    "a pjit of unknown arguments": """
words = dict(in_axis_resources=P('d'), out_axis_resources=None)
rest = (P('d'), P('m'))
with mesh: print(pjit(double, **words)(X).sum(), pjit(double, *rest)(X).sharding.spec)
""",
    "partials and aliases of pjit": """
fixed = functools.partial(pjit, in_axis_resources=P('d'))
power = functools.partial(pjit, static_argnums=1, out_axis_resources=None)
maybe = pjit if jax.device_count() > 1 else jax.jit
@functools.partial(pjit, in_axis_resources=(P('d'), None), out_axis_resources=P('d'))
def add(x, y): return x + y
with mesh:
    print(fixed(double, out_axis_resources=P('m'))(X).sharding.spec, add(X, 1.0).sum())
    print(power(lambda x, n: x**n, in_axis_resources=P('d'))(X, 2).sum())
    print(maybe(double, in_axis_resources=None, out_axis_resources=P('d'))(X).sharding.spec)
""",
    "a held constraint": """
limit = functools.partial(with_sharding_constraint, axis_resources=P('d'))
pairs = [(with_sharding_constraint, P('m'))]
with mesh: print(jax.jit(lambda x: pairs[0][0](limit(x), pairs[0][1]))(X).sharding.spec)
""",
    "held constructors": """
make, whole = GDA.from_callback, pjit(double, FROM_GDA, None)
of_rows = functools.partial(GDA.from_callback, (8, 8), mesh, P('d'))
args = (8, 8), mesh, P('d')
for y in (make((8, 8), mesh, P('m'), lambda i: X[i]), of_rows(lambda i: X[i])):
    with mesh: print(whole(y).sum(), tuple(y.mesh_axes))
print(GDA.from_callback(*args, lambda i: X[i]).local_data(5).sum(), gda_lib.get_shard_shape(*args))
indices = gda_lib.get_shard_indices
print(sorted(map(str, indices(*args).values()))[0], isinstance(make(*args, lambda i: X[i]), GDA))
""",
    "stages": """
f = pjit(double, in_axis_resources=P('d'), out_axis_resources=P('d'))
with mesh: compiled = f.lower(X, _global_avals=True).compile()
print(compiled(X).sum(), f.__name__)
""",
    "a decorated method": """
class Model:
    scale = 3
    @functools.partial(pjit, static_argnums=0, in_axis_resources=P('d'), out_axis_resources=None)
    def apply(self, x): return x * self.scale
with mesh: print(Model().apply(X).sum())
""",
    # Attributes of arrays, and of other objects.
    "devices": """
class Worker:
    def device(self): return 'own'
def device_of(x): return x.device()
y = jax.device_put(X, jax.devices()[3])
print(Worker().device(), device_of(Worker()), device_of(y), y.device().id, jnp.ones(3).device().id)
""",
    "buffers": """
class Batch:
    device_buffers = local_shards = mesh_axes = 'own'
    def local_data(self, n): return n
    def __init__(self): self.device_buffer = 'own'
def read(x): return len(x.device_buffers), len(x.local_shards), x.mesh_axes, type(x.local_data(0))
y = GDA.from_callback((8, 8), mesh, P('d'), lambda i: X[i])
batch = Batch()
print(read(batch), batch.device_buffer, len(y.local_shards), y.local_data(0).shape)
""",
    # Specs as tuples.
    "specs": """
s, rest = P('d', None), [P('d'), ('d',), None, ['d']]
print(tuple(P(None) + s), s == ('d', None), s != ('d',), {s: 1}[P('d', None)])
print([spec == ('d',) for spec in rest], [isinstance(spec, tuple) for spec in rest])
print([isinstance(spec, (list, tuple)) for spec in rest], ('d', None) == s, P() == ())
print([each == (('d', 'm'), None) for each in [P(('d', 'm'), None), P('d', None)]])
""",
    "specs by the name of their module": """
from jax.experimental import pjit as pjit_lib
def read(s): return s == ('d', None), isinstance(s, tuple)
print(read(pjit_lib.PartitionSpec('d', None)), read(('d', None)), read(None))
""",
    "flags": """
calls = []
def note(x): calls.append(x); return x
if note(False) or jax.config.jax_array: note(1)
x = note(3) and jax.config.jax_array
def values():
    if not jax.config.jax_array: yield 1
print(calls, x, list(values()), False or 'kept', 'kept' and True)
""",
    "own names of inserted functions": """
def _pjit(x): return 'own'
_as_tuple = 'own'
def build(wrap): return wrap(double, in_axis_resources=P('d'), out_axis_resources=None)
with mesh: print(build(pjit)(X).sum(), _pjit(1), _as_tuple, [s == ('d',) for s in [P('d')]])
""",
}


def output_of(code: str) -> str:
    text = io.StringIO()
    with contextlib.redirect_stdout(text):
        exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})
    return text.getvalue()


@pytest.mark.parametrize("program", SAME.values(), ids=SAME)
def test_migrated_program_prints_what_the_old_one_prints(program: str) -> None:
    with installer.installed():
        expected = output_of(HEAD + program)
    assert expected
    assert output_of(migrate(HEAD + program).code) == expected
