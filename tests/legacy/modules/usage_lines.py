"""A line of code for each everyday name of the era, which runs it.

`jax`, `jnp`, `np` and `importlib` are imported.
"""

from xlashard.legacy.entries.entry import IMPORTED

_JAXPR = "closed = jax.make_jaxpr(lambda x, y: x * 2 + y)(1.0, 2.0); jaxpr = closed.jaxpr; "
_AVAL = "aval = jax.core.get_aval(jnp.ones(3, jnp.float32)); "


def _imports(module: str, *names: str) -> str:
    return f"from {module} import {', '.join(names)}\n"


def _use(module: str, lines: dict[str, str]) -> dict[str, str]:
    """Return lines that use a name of a module, after its import."""
    return {f"{module}.{name}": _imports(module, name) + line for name, line in lines.items()}


_TREE = "tree = {'w': [1, (2, None)]}; "

TREES = {
    "jax.tree_map": "assert jax.tree_map(lambda x, y: x + y, [1, (2,)], [3, (4,)]) == [4, (6,)]",
    "jax.tree_leaves": _TREE + "assert jax.tree_leaves(tree) == [1, 2]",
    "jax.tree_flatten": _TREE + "assert jax.tree_flatten(tree)[0] == [1, 2]",
    "jax.tree_structure": _TREE + "assert jax.tree_structure(tree).num_leaves == 2",
    "jax.tree_unflatten": _TREE
    + "assert jax.tree_unflatten(jax.tree_structure(tree), [1, 2]) == tree",
    "jax.tree_transpose": "outer, inner = jax.tree_structure([0, 0]), jax.tree_structure((0, 0));"
    "assert jax.tree_transpose(outer, inner, [(1, 2), (3, 4)]) == ([1, 3], [2, 4])",
    "jax.flatten_fun_nokwargs": "import jax.linear_util as lu\n"
    "flat, out = jax.flatten_fun_nokwargs(lu.wrap_init(lambda x: {'y': x['w']}), "
    "jax.tree_structure(({'w': 0},)))\n"
    "assert flat.call_wrapped(5) == [5] and out() == jax.tree_structure({'y': 0})",
    "jax.treedef_is_leaf": "assert jax.treedef_is_leaf(jax.tree_structure(1))",
    "jax.tree_multimap": "assert jax.tree_multimap(max, [1, 5], [3, 4]) == [3, 5]",
    "jax.tree_util.tree_multimap": _imports("jax.tree_util", "tree_multimap")
    + "assert tree_multimap(lambda xs, y: xs[0] + y, [[1], [2]], [3, 4],"
    "is_leaf=lambda x: x in ([1], [2])) == [4, 6]",
    "jax.tree_util.build_tree": _TREE + "t = jax.tree_structure({'w': [1, (2,)]});"
    "assert jax.tree_util.build_tree(t, [[1, [2]]]) == {'w': [1, (2,)]}",
    **_use(
        "jax.tree_util",
        {
            "AttributeKeyPathEntry": "assert AttributeKeyPathEntry('w').pprint() == '.w'",
            "GetitemKeyPathEntry": "assert GetitemKeyPathEntry('w').pprint() == \"['w']\"",
            "register_keypaths": "from jax.tree_util import AttributeKeyPathEntry\n"
            "class Node: pass\n"
            "register_keypaths(Node, lambda node: [AttributeKeyPathEntry('w')])\n"
            "from xlashard.legacy.modules.toplevel import KEY_PATHS\n"
            "assert KEY_PATHS.pop(Node)(Node())[0].key == 'w'",
        },
    ),
}

CORE = {
    **_use(
        "jax.core",
        {
            "Primitive": "p = Primitive('minus'); p.def_impl(lambda x: -x);assert p.bind(3) == -3",
            "Literal": _JAXPR + "assert any(isinstance(v, Literal) for v in jaxpr.eqns[0].invars)",
            "Token": "assert isinstance(Token, type)",
            "AbstractToken": "assert AbstractToken().str_short()",
            "abstract_token": "from jax.core import AbstractToken\n"
            "assert isinstance(abstract_token, AbstractToken)",
            "jaxpr_as_fun": _JAXPR + "assert jaxpr_as_fun(closed)(1.0, 2.0)[0] == 4",
            "mapped_aval": _AVAL + "assert mapped_aval(3, 0, aval).shape == ()",
            "unmapped_aval": _AVAL + "assert unmapped_aval(5, 0, aval).shape == (5, 3)",
            "subjaxprs": "outer = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).jaxpr;"
            "assert len(list(subjaxprs(outer))) == 1",
            "jaxprs_in_params": "outer = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).jaxpr;"
            "assert len(list(jaxprs_in_params(outer.eqns[0].params))) == 1",
            "DropVar": _JAXPR + "assert not any(isinstance(v, DropVar) for v in jaxpr.outvars)",
            "Effect": "class Mine(Effect): pass",
            "Effects": "effects: Effects = set()",
            "InconclusiveDimensionOperation": "assert issubclass("
            "InconclusiveDimensionOperation, Exception)",
            "JaxprTypeError": "assert issubclass(JaxprTypeError, TypeError)",
            "ConcretizationTypeError": "assert issubclass(ConcretizationTypeError, TypeError)",
            "TracerArrayConversionError": "try: jax.jit(np.asarray)(1.0)\n"
            "except TracerArrayConversionError: pass",
            "TracerIntegerConversionError": "try: jax.jit(range)(1)\n"
            "except TracerIntegerConversionError: pass",
            "UnexpectedTracerError": "assert issubclass(UnexpectedTracerError, Exception)",
            "check_jaxpr": _JAXPR + "check_jaxpr(jaxpr)",
            "concrete_or_error": "assert concrete_or_error(int, jnp.ones((), int), 'why') == 1",
            "find_top_trace": "seen = []\n"
            "def look(x):\n"
            "    seen.append((find_top_trace(()).level, find_top_trace([x]).level)); return x\n"
            "look(1.0); jax.grad(look)(1.0); jax.jit(look)(1.0); jax.jit(jax.grad(look))(1.0)\n"
            "jax.grad(jax.jit(lambda x: look(x)))(1.0)\n"
            "jax.jit(lambda x: jax.jit(lambda x: look(x))(x))(1.0)\n"
            "assert seen == [(0, 0), (0, 1), (1, 1), (1, 2), (2, 2), (2, 2)]\n"
            "assert find_top_trace([1.0]).main.level == 0",
            "cur_sublevel": "seen = []\n"
            "def look(x): seen.append(cur_sublevel().level); return x\n"
            "look(1.0); jax.vmap(look)(jnp.ones(2)); jax.jit(look)(1.0); assert seen == [0, 0, 1]\n"
            "assert cur_sublevel() == cur_sublevel()",
            "thread_local_state": "seen, traces = [], thread_local_state.trace_state.trace_stack\n"
            "def look(x): seen.append((len(traces.stack), traces.dynamic.level)); return x\n"
            "look(1.0); jax.vmap(look)(jnp.ones(2)); jax.jit(jax.grad(look))(1.0)\n"
            "assert seen == [(1, 0), (2, 0), (3, 1)]\n"
            "assert [m.level for m in traces.stack] == [0] and traces.stack[0].trace_type",
            "new_jaxpr_eqn": _JAXPR + "e = jaxpr.eqns[0];"
            "new = new_jaxpr_eqn(e.invars, e.outvars, e.primitive, e.params, e.effects);"
            "assert new.primitive is e.primitive",
            "no_effects": _JAXPR + "assert jaxpr.effects == no_effects",
            "join_effects": "assert join_effects({1}, {2}) == {1, 2}",
            "primal_dtype_to_tangent_dtype": "assert primal_dtype_to_tangent_dtype("
            "np.dtype('float32')) == np.float32",
            "valid_jaxtype": "assert valid_jaxtype(1.0) and not valid_jaxtype('word')",
            "axis_frame": "assert jax.vmap(lambda x: x * axis_frame('i').size, axis_name='i')("
            "jnp.ones(4))[0] == 4",
            "call_p": "assert call_p.multiple_results",
            "closed_call_p": "assert closed_call_p.multiple_results",
            "trace_state_clean": "assert trace_state_clean()\n"
            "assert not jax.jit(lambda: jnp.asarray(trace_state_clean()))()",
            "safe_map": "assert list(safe_map(max, [1, 5], [3, 4])) == [3, 5]",
            "safe_zip": "assert list(safe_zip([1], [2])) == [(1, 2)]",
            "NamedShape": "assert NamedShape(2, 3, i=4).total == 24",
            "as_named_shape": "s = as_named_shape((2, 3));"
            "assert (s.rank, s.positional, s.names) == (2, (2, 3), ()) and as_named_shape(s) is s",
            "Shape": "def f(shape: Shape) -> Shape: return shape",
            "raise_to_shaped": _AVAL + "assert raise_to_shaped(aval) is aval\n"
            "assert raise_to_shaped(aval, weak_type=True).weak_type",
            "canonicalize_shape": "assert canonicalize_shape([2, np.int64(3)]) == (2, 3)",
            "get_aval": "assert get_aval(jnp.ones(3)).shape == (3,)",
            "gensym": _AVAL + _JAXPR + "new = gensym([jaxpr]);"
            "a, b = new(aval), new(aval); assert a is not b and a.aval is aval",
            "Jaxpr": _JAXPR + "assert isinstance(jaxpr, Jaxpr)\n"
            "made = Jaxpr(jaxpr.constvars, jaxpr.invars, jaxpr.outvars, jaxpr.eqns);"
            "assert len(made.eqns) == 2",
            "ClosedJaxpr": _JAXPR + "assert isinstance(closed, ClosedJaxpr)\n"
            "again = ClosedJaxpr(jaxpr, closed.consts);"
            "assert again.literals == [] and len(again.in_avals) == 2",
            "JaxprEqn": _JAXPR + "assert all(isinstance(e, JaxprEqn) for e in jaxpr.eqns)",
            "Var": _JAXPR + "assert all(isinstance(v, Var) for v in jaxpr.invars)",
            **dict.fromkeys(
                (
                    *("pp_eqn", "pp_eqn_rules", "pp_eqns", "pp_jaxpr", "pp_kv_pair"),
                    *("pp_kv_pairs", "pp_var", "pp_vars", "JaxprPpContext", "JaxprPpSettings"),
                ),
                _JAXPR + "from jax import core\n"
                "context, settings = core.JaxprPpContext(), core.JaxprPpSettings()\n"
                "doc = core.pp_jaxpr(jaxpr, context, settings)\n"
                "assert 'mul' in doc.format() and core.pp_var(jaxpr.invars[0], context)\n"
                "assert 'mul' in core.pp_eqns(jaxpr.eqns, context, settings).format()\n"
                "assert core.pp_vars(jaxpr.invars, context, print_shapes=True).format()\n"
                "assert 'n=1' in core.pp_kv_pairs([('n', 1)], context, settings).format()\n"
                "assert 'n=1' in core.pp_kv_pair('n', 1, context, settings).format()\n"
                "marked = core.Primitive('marked')\n"
                "core.pp_eqn_rules[marked] = lambda eqn, *_: core.pp_var(eqn.invars[0], context)\n"
                "del core.pp_eqn_rules[marked]\n"
                "assert 'add' in core.pp_eqn(jaxpr.eqns[1], context, settings).format()",
            ),
            "source_info_util": _JAXPR
            + "assert type(source_info_util.new_source_info()) is type(jaxpr.eqns[0].source_info)",
            "custom_typechecks": "from jax import core\n"
            "p = core.Primitive('checked'); custom_typechecks[p] = lambda *a, **k: None\n"
            "del custom_typechecks[p]",
            "lattice_join": _AVAL + "weak = aval.update(weak_type=True)\n"
            "assert lattice_join(None, aval) is aval and lattice_join(aval, None) is aval\n"
            "assert lattice_join(weak, aval) == aval == lattice_join(aval, weak)\n"
            "assert lattice_join(weak, weak) == weak\n"
            "try: lattice_join(aval, jax.core.ShapedArray((4,), aval.dtype))\n"
            "except TypeError: pass\nelse: raise AssertionError",
            "typecheck": _AVAL + "assert typecheck(aval, jnp.zeros(3)) and not typecheck(aval, 1)",
            "typecompat": _AVAL + "assert typecompat(aval, aval.update(weak_type=True))",
            "typematch": _AVAL + "assert typematch(aval, aval.update(weak_type=True))",
            "traverse_jaxpr_params": "outer = jax.make_jaxpr(jax.jit(lambda x: x + 1))(1.0).jaxpr\n"
            "params = outer.eqns[0].params\n"
            "assert traverse_jaxpr_params(lambda j: len(j.eqns), params) == {'jaxpr': 1}",
            "AxisName": "assert isinstance('batch', AxisName)",
            "DimSize": "def f(size: DimSize) -> DimSize: return size",
            "dimension_as_value": "assert dimension_as_value(3) == 3",
            "is_constant_dim": "assert is_constant_dim(3)",
            "is_constant_shape": "assert is_constant_shape((3, 4))",
            "DShapedArray": _AVAL + "assert type(aval) is not DShapedArray",
            "UnitVar": _JAXPR + "assert not isinstance(jaxpr.invars[0], UnitVar)",
            "ConcreteArray": _AVAL + "assert not isinstance(aval, ConcreteArray)",
        },
    ),
    "jax.linear_util": "import jax.linear_util as lu;"
    "assert lu.wrap_init(max).call_wrapped(2, 3) == 3",
    **_use(
        "jax.linear_util",
        {
            "StoreException": "assert issubclass(StoreException, Exception)",
            "WrappedFun": "from jax.linear_util import wrap_init\n"
            "assert isinstance(wrap_init(abs), WrappedFun)",
            "cache": "from jax.linear_util import wrap_init\n"
            "assert cache(lambda f: f.call_wrapped(-1))(wrap_init(abs)) == 1",
            "merge_linear_aux": "from jax.linear_util import transformation_with_aux, wrap_init\n"
            "@transformation_with_aux\n"
            "def count(*args):\n"
            "    result = yield args, {}\n"
            "    yield result, len(args)\n"
            "f, out = count(wrap_init(max)); g, other = count(wrap_init(max))\n"
            "f.call_wrapped(1, 2)\n"
            "assert merge_linear_aux(out, other) == (True, 2)",
            "transformation": "from jax.linear_util import wrap_init\n"
            "@transformation\n"
            "def twice(*args):\n"
            "    result = yield args, {}\n"
            "    yield 2 * result\n"
            "assert twice(wrap_init(max)).call_wrapped(1, 3) == 6",
            "transformation_with_aux": "from jax.linear_util import wrap_init\n"
            "@transformation_with_aux\n"
            "def count(*args):\n"
            "    result = yield args, {}\n"
            "    yield result, len(args)\n"
            "f, out = count(wrap_init(max)); assert f.call_wrapped(1, 3) == 3 and out() == 2",
            "wrap_init": "assert wrap_init(max).call_wrapped(2, 3) == 3",
        },
    ),
    "jax.util": "import jax.util; assert jax.util.unzip2([(1, 2)]) == ((1,), (2,))",
    **_use(
        "jax.util",
        {
            "HashableFunction": "f = lambda x: x;"
            "assert HashableFunction(f, 1) == HashableFunction(f, 1) != HashableFunction(f, 2)",
            "as_hashable_function": "make = as_hashable_function(closure=('k',));"
            "f = lambda x: -x; assert make(f) == make(f) and make(f)(-1) == 1",
            "cache": "assert cache()(abs)(-1) == 1",
            "safe_map": "assert list(safe_map(abs, [-1])) == [1]",
            "safe_zip": "assert list(safe_zip([1], [2])) == [(1, 2)]",
            "split_dict": "assert split_dict({'a': 1, 'b': 2}, ['b', 'a']) == [2, 1]\n"
            "try: split_dict({'a': 1}, [])\nexcept KeyError: pass\nelse: raise AssertionError",
            "split_list": "assert split_list([1, 2, 3], [1]) == [[1], [2, 3]]",
            "split_merge": "yes, no, merge = split_merge(lambda x: x > 1, [1, 2, 3]);"
            "assert (yes, no, merge([5, 6], [4])) == ([2, 3], [1], [4, 5, 6])",
            "subvals": "assert subvals([1, 2], [(0, 9)]) == (9, 2)",
            "toposort": "assert toposort([]) == []",
            "unzip2": "assert unzip2([(1, 2), (3, 4)]) == ((1, 3), (2, 4))",
            "wrap_name": "assert wrap_name('f', 'jit') == 'jit(f)'",
            "wraps": "assert wraps(abs)(lambda x: x).__name__ == 'abs'",
        },
    ),
    "jax.abstract_arrays": "import jax.abstract_arrays as a; assert a.ShapedArray",
    **_use(
        "jax.abstract_arrays",
        {
            "ShapedArray": "assert ShapedArray((2,), np.dtype('float32')).shape == (2,)",
            "array_types": "assert np.ndarray in array_types",
            "raise_to_shaped": _AVAL + "assert raise_to_shaped(aval).shape == (3,)",
        },
    ),
}

_NP = "x = jnp.array([[3.0, -1.5], [1.0, 2.0]]); "

NUMPY = {
    "jax.numpy.msort": _NP + "assert jnp.msort(x).tolist() == [[1.0, -1.5], [3.0, 2.0]]",
    "jax.numpy.alltrue": "assert jnp.alltrue(jnp.array([True]))",
    "jax.numpy.cumproduct": "assert jnp.cumproduct(jnp.array([2, 3])).tolist() == [2, 6]",
    "jax.numpy.product": "assert jnp.product(jnp.array([2, 3])) == 6",
    "jax.numpy.sometrue": "assert not jnp.sometrue(jnp.array([False]))",
    "jax.numpy.isscalar": "assert not jnp.isscalar(jnp.ones(())) and jnp.isscalar(2.0)\n"
    "assert jnp.isscalar(np.float32(1)) and not jnp.isscalar(np.ones(()))\n"
    "assert jax.jit(lambda x: x * 2 if jnp.isscalar(x) else x)(3.0) == 6",
    "jax.numpy.NINF": "assert jnp.NINF == -np.inf",
    "jax.numpy.NZERO": "assert np.signbit(jnp.NZERO)",
    "jax.numpy.PZERO": "assert not np.signbit(jnp.PZERO)",
    "jax.numpy.in1d": "a = jnp.array([[1, 2], [3, 4]]);"
    "assert jnp.in1d(a, jnp.array([2])).tolist() == [False, True, False, False]\n"
    "assert jnp.in1d(a, 2, invert=True).tolist() == [True, False, True, True]",
    "jax.numpy.issubsctype": "assert jnp.issubsctype(jnp.float32, jnp.floating)",
    "jax.numpy.row_stack": "assert jnp.row_stack([jnp.ones(2), jnp.ones(2)]).shape == (2, 2)",
    "jax.numpy.trapz": "assert jnp.trapz(jnp.array([1.0, 2.0])) == 1.5",
    "jax.numpy.round_": "assert jnp.round_(1.26, 1) == jnp.round(1.26, 1)",
    "jax.numpy.fix": "assert jnp.fix(jnp.array([-1.5, 1.5])).tolist() == [-1.0, 1.0]",
    "jax.lax.pvary": "mesh = jax.sharding.Mesh(jax.devices(), 'x');"
    "f = lambda x: jax.lax.pvary({'w': x}, 'x')['w'] * jax.lax.axis_index('x');"
    "f = jax.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P('x'));"
    "assert f(jnp.ones(1)).shape == (len(jax.devices()),) and jax.lax.pvary(3, ()) == 3",
    "jax.lax.all_gather_invariant": "mesh = jax.sharding.Mesh(jax.devices(), 'x');"
    "f = lambda x: jax.lax.all_gather_invariant(x, 'x', tiled=True);"
    "f = jax.shard_map(f, mesh=mesh, in_specs=jax.P('x'), out_specs=jax.P());"
    "assert (f(jnp.arange(8.0)) == jnp.arange(8.0)).all()",
    "jax.scipy.special.sph_harm": "one = jnp.array([1]); angle = jnp.array([0.3])\n"
    "got = jax.scipy.special.sph_harm(one, one, angle, 2 * angle, n_max=2)\n"
    "expected = jax.scipy.special.sph_harm_y(one, one, 2 * angle, angle, n_max=2)\n"
    "assert (got == expected).all()",
    "jax.lax.tie_in": "assert jax.lax.tie_in(1, 2) == 2",
    "jax.lax.zeros_like_array": "assert jax.lax.zeros_like_array(jnp.ones(2)).tolist() == [0, 0]",
    "jax.nn.normalize": "np.testing.assert_allclose("
    "jax.nn.normalize(jnp.array([1.0, 3.0])), [-1, 1], rtol=1e-3)",
    "jax.ops.index": "assert jax.ops.index[1:, 0] == (slice(1, None), 0)",
    **{
        f"jax.ops.index_{name}": f"x = jnp.array([1, 5]); "
        f"assert jax.ops.index_{name}(x, jax.ops.index[0], 3).tolist() == [{value}, 5]"
        for name, value in {"update": 3, "add": 4, "mul": 3, "min": 1, "max": 3}.items()
    },
    "jax.scipy.linalg.tril": "assert jax.scipy.linalg.tril(jnp.ones((2, 2)))[0, 1] == 0",
    "jax.scipy.linalg.triu": "assert jax.scipy.linalg.triu(jnp.ones((2, 2)))[1, 0] == 0",
}

_KEY = "key = jax.random.PRNGKey(0); "
_BRIDGE = "from jax.lib import xla_bridge as b; "

EVERYDAY = {
    **TREES,
    "jax.ShapedArray": "assert jax.ShapedArray((2,), np.dtype('float32')).shape == (2,)",
    "jax.xla_computation": "made, out = jax.xla_computation(lambda x, n: x + n, static_argnums=1,"
    "return_shape=True, backend='cpu')(jnp.ones(3), 2);"
    "assert 'add' in made.as_hlo_text() and out.shape == (3,)",
    "jax.experimental.loops": "from jax.experimental import loops",
    "jax.array_ref": "ref = jax.array_ref(jnp.ones(2)); ref[0] = 3.0; assert ref[...].sum() == 4",
    "jax.ArrayRef": "assert jax.ArrayRef is jax.Ref",
    "jax.ref.array_ref": "assert jax.ref.array_ref is jax.new_ref",
    "jax.ref.ArrayRef": "assert jax.ref.ArrayRef is jax.Ref",
    "jax.experimental.mutable_array": "from jax.experimental import mutable_array;"
    "assert mutable_array(jnp.ones(2))[...].sum() == 2",
    "jax.experimental.MutableArray": "assert jax.experimental.MutableArray is jax.Ref",
    "jax.experimental.with_sharding_constraint": "mesh = jax.sharding.Mesh(jax.devices(), 'x');"
    "from jax.experimental import with_sharding_constraint as constrain\n"
    "with mesh: x = jax.jit(lambda x: constrain(x, jax.P('x')))(jnp.ones(8))\n"
    "assert len(x.sharding.device_set) == len(jax.devices())",
    **{
        f"jax.experimental.x64_context{name}": "from jax.experimental import x64_context\n"
        "with x64_context.enable_x64(): assert jnp.arange(2.0).dtype == 'float64'\n"
        "with x64_context.disable_x64(): assert jnp.arange(2.0).dtype == 'float32'"
        for name in ("", ".enable_x64", ".disable_x64")
    },
    "jax.experimental.layout.DeviceLocalLayout": "from jax.experimental import layout\n"
    "assert layout.DeviceLocalLayout((0, 1)).major_to_minor == (0, 1)",
    "jax.experimental.layout.with_dll_constraint": "from jax.experimental.layout import *\n"
    "from jax.experimental.layout import DeviceLocalLayout, with_dll_constraint\n"
    "f = jax.jit(lambda x: with_dll_constraint(x, DeviceLocalLayout((0, 1))))\n"
    "assert f(jnp.ones((2, 3))).shape == (2, 3)",
    "jax.extend.ffi": "import jax.extend.ffi\nassert jax.extend.ffi.ffi_call is jax.ffi.ffi_call",
    "jax.curry": "assert jax.curry(max)(2)(3) == 3",
    # Calling it would end the backend of all other tests.
    "jax.clear_backends": "import jax.extend.backend as b;"
    "assert jax.clear_backends is b.clear_backends",
    "jax.device_put_replicated": "x = jax.device_put_replicated(jnp.ones(3), jax.local_devices());"
    "assert x.shape == (8, 3)",
    "jax.device_put_sharded": "d = jax.local_devices();"
    "assert jax.device_put_sharded([jnp.ones(3)] * 8, d).shape == (8, 3)",
    "jax.config": "import jax.config; jax.config.update('jax_debug_nans', False)",
    "jax.config.config": "from jax.config import config; config.update('jax_debug_nans', False)\n"
    "assert config is jax.config and config.jax_debug_nans is False",
    **{
        f"jax.config.define_{kind}_state": "import os\nfrom jax import config\n"
        f"name, first, then = 'program_{kind}', {first!r}, {then!r}\n"
        f"state = config.define_{kind}_state(name, {options}default=first, help='About it.')\n"
        "try:\n"
        "    assert getattr(config, name) == first\n"
        "    config.update(name, then); assert getattr(config, name) == then\n"
        "    with state(first): assert getattr(config, name) == first\n"
        "finally:\n"
        "    delattr(type(config), name)\n"
        "    del config._value_holders[name], config.meta[name]"
        for kind, first, then, options in (
            ("bool", True, False, ""),
            ("enum", "a", "b", "enum_values=['a', 'b'], "),
            ("float", 1.5, 2.5, ""),
            ("int", 1, 2, ""),
            ("string", "a", "b", ""),
        )
    },
    "jax.random.KeyArray": _KEY + "assert isinstance(key, jax.random.KeyArray)\n"
    "assert isinstance(jax.random.split(jax.random.key(0)), jax.random.KeyArray)\n"
    "assert not isinstance(jnp.ones(2), jax.random.KeyArray)\n"
    "def f(key: jax.random.KeyArray | None = None): return key",
    "jax.random.PRNGKeyArray": _KEY + "assert isinstance(key, jax.random.PRNGKeyArray)",
    "jax.random.default_prng_impl": "assert jax.random.default_prng_impl().key_shape == (2,)",
    "jax._src.random.prng.PRNGKeyArray.unsafe_raw_array": "key = jax.random.key(0)\n"
    "assert (key.unsafe_raw_array() == jax.random.PRNGKey(0)).all()\n"
    "assert jax.random.split(key).unsafe_raw_array().shape == (2, 2)",
    **_use(
        "jax.experimental.compilation_cache.compilation_cache",
        {
            "initialize_cache": "before = jax.config.jax_compilation_cache_dir\n"
            "from jax.experimental.compilation_cache.compilation_cache import is_initialized\n"
            "try:\n    initialize_cache('/tmp/cache')\n    assert is_initialized()\n"
            "finally: jax.config.update('jax_compilation_cache_dir', before)",
            "is_initialized": "before = jax.config.jax_compilation_cache_dir\n"
            "jax.config.update('jax_compilation_cache_dir', None)\n"
            "try: assert not is_initialized()\n"
            "finally: jax.config.update('jax_compilation_cache_dir', before)",
        },
    ),
    "jax._src.api.FLAGS": _imports("jax._src.api", "FLAGS")
    + "FLAGS.experimental_cpp_pjit = False; assert not jax.config.experimental_cpp_pjit\n"
    + "jax.config.update('experimental_cpp_pjit', True); assert FLAGS.experimental_cpp_pjit",
    "jax._src.util.prod": _imports("jax._src.util", "prod") + "assert prod((2, 3)) == 6",
    "jax._src.numpy.lax_numpy.isin": "from jax._src.numpy.lax_numpy import isin\n"
    "assert isin(jnp.arange(3), jnp.ones(1, int)).tolist() == [False, True, False]",
    "jax._src.numpy.lax_numpy._ScalarMeta": "import jax._src.numpy.lax_numpy as lax_numpy\n"
    "assert isinstance(jnp.float32, lax_numpy._ScalarMeta)\n"
    "assert not isinstance(np.float32, lax_numpy._ScalarMeta)",
    "jax.lib.xla_bridge._backends": "from jax.lib import xla_bridge\n"
    "jax.devices(); found = xla_bridge._backends or {}\n"
    "assert found.get('cpu') is jax.devices('cpu')[0].client and 'moon' not in found",
    "jax._src.test_util.create_global_mesh": "import jax._src.test_util as jtu, unittest\n"
    "mesh = jtu.create_global_mesh((4, 2), ('x', 'y'))\n"
    "assert mesh.shape['x'] == 4 and mesh.devices[0, 1].id == 1\n"
    "try: jtu.create_global_mesh((1024,), ('x',))\nexcept unittest.SkipTest: pass\n"
    "else: raise AssertionError",
    "jax.random.rbg_key": "assert jax.random.rbg_key(0).shape == (4,)",
    "jax.random.unsafe_rbg_key": "assert jax.random.unsafe_rbg_key(0).shape == (4,)",
    "jax.random.threefry2x32_key": _KEY + "assert (jax.random.threefry2x32_key(0) == key).all()",
    "jax.random.threefry_2x32": _KEY
    + "assert jax.random.threefry_2x32(key, jnp.arange(2, dtype=jnp.uint32)).shape == (2,)",
    "jax.random.shuffle": _KEY
    + "assert sorted(jax.random.shuffle(key, jnp.arange(5)).tolist()) == [0, 1, 2, 3, 4]",
    "jax._src.prng": "import jax._src.prng as prng\n"
    "assert isinstance(jax.random.key(0), prng.PRNGKeyArray)",
    "jax.prng": "import jax.prng; assert jax.prng.PRNGImpl",
    "jax.prng.PRNGKeyArray": "assert isinstance(jax.random.key(0), jax.prng.PRNGKeyArray)",
    "jax.prng.seed_with_impl": "from jax import prng;"
    "key = prng.seed_with_impl(prng.threefry_prng_impl, 0);"
    "assert isinstance(key, prng.PRNGKeyArray)",
    "jax.prng.threefry_prng_impl": "assert jax.prng.threefry_prng_impl.key_shape == (2,)",
    "jax.prng.rbg_prng_impl": "assert jax.prng.rbg_prng_impl.key_shape == (4,)",
    "jax.prng.unsafe_rbg_prng_impl": "assert jax.prng.unsafe_rbg_prng_impl.key_shape == (4,)",
    "jax.prng.threefry_2x32": _KEY
    + "assert jax.prng.threefry_2x32(key, jnp.arange(2, dtype=jnp.uint32)).shape == (2,)",
    "jax.lib.xla_bridge": "import jax.lib.xla_bridge as b; assert b.get_backend().platform",
    "jax._src.lib.xla_bridge": "from jax._src.lib import xla_bridge as b; b.get_backend()",
    "jax._src.lib.xla_extension_version": _imports("jax._src.lib", "xla_extension_version")
    + "assert xla_extension_version >= 140",
    "jax.lib.xla_bridge.default_backend": _BRIDGE + "assert b.default_backend() == 'cpu'",
    "jax.lib.xla_bridge.device_count": _BRIDGE + "assert b.device_count() == 8",
    "jax.lib.xla_bridge.devices": _BRIDGE + "assert b.devices() == jax.devices()",
    "jax.lib.xla_bridge.get_backend": _BRIDGE + "assert b.get_backend('cpu').platform == 'cpu'",
    "jax.lib.xla_bridge.get_compile_options": _BRIDGE
    + "assert b.get_compile_options(num_replicas=1, num_partitions=2).num_partitions == 2",
    "jax.lib.xla_bridge.local_device_count": _BRIDGE + "assert b.local_device_count() == 8",
    "jax.lib.xla_bridge.local_devices": _BRIDGE + "assert b.local_devices() == jax.devices()",
    "jax.lib.xla_bridge.process_count": _BRIDGE + "assert b.process_count() == 1",
    "jax.lib.xla_bridge.process_index": _BRIDGE + "assert b.process_index() == 0",
    "jax.lib.xla_client": "from jax.lib import xla_client; assert xla_client.Client",
    "jax.lib.xla_extension": "from jax.lib import xla_extension as e;"
    "assert isinstance(jax.devices()[0], e.Device)",
    "jax.experimental.enable_x64": "from jax.experimental import enable_x64\n"
    "with enable_x64(): assert jnp.ones(()).dtype == 'float64'",
    "jax.experimental.disable_x64": "from jax.experimental import disable_x64\n"
    "with disable_x64(): assert jnp.ones(()).dtype == 'float32'",
    "jax.experimental.optimizers": "from jax.experimental import optimizers;"
    "init, update, get = optimizers.sgd(0.5); assert get(update(0, 1.0, init(2.0))) == 1.5",
    "jax.experimental.stax": "from jax.experimental import stax; init, apply = stax.Dense(3);"
    "shape, params = init(jax.random.PRNGKey(0), (2, 4)); assert shape == (2, 3)",
    "jax.ad_checkpoint.checkpoint": _imports("jax.ad_checkpoint", "checkpoint")
    + "assert jax.grad(checkpoint(lambda x: x * x))(3.0) == 6",
    "jax.ad_checkpoint.remat": _imports("jax.ad_checkpoint", "remat")
    + "assert jax.grad(remat(lambda x: x * x))(3.0) == 6",
    "jax.dlpack.to_dlpack": "c = jax.dlpack.to_dlpack(jnp.ones(3)); assert 'dltensor' in repr(c)",
    "jax.Device.live_buffers": "x = jnp.ones(3); d = jax.devices()[0];"
    "assert any(b.shape == (3,) for b in d.live_buffers())",
}

_HCB = "from jax.experimental import host_callback as hcb\nseen = []\n"

HOST_CALLBACK = {
    "jax.experimental.host_callback": "import jax.experimental.host_callback as hcb;"
    "assert hcb.id_tap",
    "jax.experimental.host_callback.call": _HCB
    + "f = jax.jit(lambda x: hcb.call(lambda v: np.sort(v['a']), {'a': x}, result_shape=x) + 1);"
    "assert f(jnp.array([3.0, 1.0])).tolist() == [2, 4]\n"
    "assert hcb.call(seen.append, jnp.ones(2)) is None; hcb.barrier_wait(); assert len(seen) == 1",
    "jax.experimental.host_callback.id_tap": _HCB
    + "tap = lambda x, transforms, what: seen.append((what, x.tolist(), transforms));"
    "f = jax.jit(lambda x: hcb.id_tap(tap, x * 2, what='double') + 1);"
    "assert f(jnp.array([3.0])).tolist() == [7]; hcb.barrier_wait();"
    "assert seen == [('double', [6.0], ())]\n"
    "assert hcb.id_tap(lambda *_: None, 1, result=5) == 5",
    "jax.experimental.host_callback.id_print": _HCB + "import io; to = io.StringIO();"
    "x = jax.jit(lambda x: hcb.id_print(x, what='weights', output_stream=to))(jnp.arange(3));"
    "hcb.barrier_wait(); assert to.getvalue() == 'what: weights\\n[0 1 2]\\n'",
    "jax.experimental.host_callback.CallbackException": _HCB
    + "def fail(_): raise ValueError('no')\n"
    "try: jax.jit(lambda x: hcb.call(fail, x, result_shape=x))(1.0).block_until_ready()\n"
    "except hcb.CallbackException: pass\nelse: raise AssertionError",
    "jax.experimental.host_callback.barrier_wait": _HCB + "hcb.barrier_wait('here')",
}

# For each module, a name that programs read and that others had as an attribute.
MEMBERS = {
    "ad": "primitive_jvps",
    "batching": "primitive_batchers",
    "core": "Primitive",
    "lu": "wrap_init",
    "maps": "thread_resources",
    "mlir": "register_lowering",
    "np": "ndarray",
    "pe": "trace_to_jaxpr_dynamic",
    "pxla": "thread_resources",
    "xb": "get_backend",
    "xla": "DeviceArray",
}
_MESH = "mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ('x', 'y'))\n"
_NAMED = _MESH + "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('x'))\n"
_GDA_FILES = "jax.experimental.gda_serialization.serialization"

# Names of other areas that no other test uses.
REACHED_INTO = {
    "jaxlib.xla_client.Client.get_default_device_assignment": (
        "from jax.lib import xla_bridge\n"
        "assign = xla_bridge.get_backend().get_default_device_assignment\n"
        "assert assign(8) == jax.devices() and assign(1) == jax.devices()[:1]\n"
        "assert assign(4, 2) == [[*row] for row in np.array(jax.devices()).reshape(4, 2)]\n"
        "try: assign(9)\nexcept ValueError: pass\nelse: raise AssertionError"
    ),
    "jax._src.mesh.Mesh._local_to_global": _MESH
    + "part = jax.core.ShapedArray((8, 4), np.dtype('float32'))\n"
    "assert mesh._local_to_global({'x': 0}, part).shape == (8, 4)  # of one process",
    "jax._src.mesh.Mesh._global_to_local": _MESH
    + "whole = jax.core.ShapedArray((8, 4), np.dtype('float32'))\n"
    "assert mesh._global_to_local({'x': 0}, whole).shape == (8, 4)  # of one process",
    **_use(
        "jax.experimental.pjit",
        {
            "PjitSharding": "from jax.experimental.pjit import OpShardingSharding\n"
            "assert isinstance(OpShardingSharding.get_replicated(jax.devices()), PjitSharding)",
            "PjitShardingMinusUnspecified": "from jax.experimental.pjit import _UNSPECIFIED\n"
            "assert not isinstance(_UNSPECIFIED, PjitShardingMinusUnspecified)",
            "MeshSharding": "from jax.experimental.pjit import _UNSPECIFIED\n"
            "assert isinstance(_UNSPECIFIED, MeshSharding)",
            "MeshShardingMinusUnspecified": "from jax.experimental.pjit import AUTO\n"
            "assert isinstance(AUTO, MeshShardingMinusUnspecified)",
        },
    ),
    **_use(
        "jax.interpreters.pxla",
        {
            "ArrayMappingOrAutoOrUnspecified": "from collections import OrderedDict\n"
            "assert isinstance(OrderedDict(x=0), ArrayMappingOrAutoOrUnspecified)",
        },
    ),
    **{
        f"{module}.{name}": f"import {module} as module\n"
        f"assert module.{name}.__name__ and hasattr(module.{name}, {member!r})"
        for module, names in IMPORTED.items()
        for name, member in MEMBERS.items()
        if name in names
    },
    **{
        f"{module}.xc": _imports(module, "xc") + "assert xc.XlaComputation"
        for module in ("jax.experimental.pjit", "jax.interpreters.pxla", "jax.interpreters.xla")
    },
    "jax.xla.xc": "import jax.xla\nassert jax.xla.xc.XlaComputation",
    "jax.experimental.maps.FrozenDict": _imports("jax.experimental.maps", "FrozenDict")
    + "assert {FrozenDict(x=0): 1}[FrozenDict({'x': 0})] == 1",
    "jax.experimental.global_device_array._hashed_index": "import jax.experimental."
    "global_device_array as g\n"
    "assert g._hashed_index((slice(0, 2),)) == g._hashed_index((slice(0, 2, None),))",
    **_use(
        "jax.interpreters.pxla",
        {
            "_shard_arg": _MESH + "from jax.interpreters.pxla import InputsHandlerMode\n"
            "devices = list(mesh.devices.flat)\n"
            "x, rows = np.arange(8.0), [(slice(i, i + 1),) for i in range(8)]\n"
            "pieces = _shard_arg(x, devices, rows, InputsHandlerMode.pmap)\n"
            "assert [p.devices() for p in pieces] == [{d} for d in devices] and pieces[3] == 3\n"
            "sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(('x', 'y')))\n"
            "placed = jax.device_put(x, sharding)\n"
            "again = _shard_arg(placed, devices, rows, InputsHandlerMode.pjit_or_xmap)\n"
            "here = [s.data.unsafe_buffer_pointer() for s in placed.addressable_shards]\n"
            "assert [p.unsafe_buffer_pointer() for p in again] == here",
            "shard_args": "from jax.interpreters.pxla import InputsHandlerMode\n"
            "devices = jax.devices()[:2]\n"
            "(a, b), (c, _) = shard_args(devices, [[(slice(0, 1),), (slice(1, 2),)], [(), ()]], "
            "InputsHandlerMode.pmap, [np.arange(2), 5])\n"
            "assert (a[0], b[0], c) == (0, 1, 5) and b.devices() == {devices[1]}",
            "_pmap_sharding_spec": "from jax.interpreters.pxla import ShardedAxis, Unstacked\n"
            "aval = jax.ShapeDtypeStruct((4, 6), 'float32')\n"
            "spec = _pmap_sharding_spec(2, 2, 4, (2, 2), aval, 1)\n"
            "assert spec.sharding[1] == Unstacked(2) and spec.mesh_shape == (2, 2, 2)\n"
            "assert spec.mesh_mapping == tuple(map(ShardedAxis, (1, 0, 2)))\n"
            "assert _pmap_sharding_spec(4, 2, 2, (2, 1), aval, None).mesh_shape == (2, 2, 2, 1)",
            "_check_gda_or_array_xla_sharding_match": _NAMED
            + "x = jax.device_put(np.ones((8, 2)), sharding)\n"
            "_check_gda_or_array_xla_sharding_match([x, 1.0], [sharding, sharding])\n"
            "other = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('y'))\n"
            "try: _check_gda_or_array_xla_sharding_match([x], [other])\nexcept ValueError: pass\n"
            "else: raise AssertionError",
        },
    ),
    "jax.interpreters.pxla.multi_host_supported_collectives": "from jax.interpreters import pxla\n"
    "pxla.multi_host_supported_collectives.add(jax.lax.pmax_p)",
    "jax.interpreters.pxla.new_mesh_sharding_specs": "from jax.interpreters import pxla\n"
    "assert pxla.new_mesh_sharding_specs is pxla.mesh_sharding_specs",
    "jax.interpreters.xla.xe": "import jax\nxe = jax.xla.xe\n"
    "assert isinstance(jax.jit(abs), (xe.CompiledFunction, xe.PmapFunction))\n"
    "assert not isinstance(abs, (xe.CompiledFunction, xe.PmapFunction))\n"
    "assert isinstance(jax.devices()[0], xe.Device)",
    **dict.fromkeys(
        ("jax.interpreters.xla.lower_fun", "jax.interpreters.xla.register_translation"),
        "from jax.interpreters import xla\nfrom xlashard.errors import RefusedError\n"
        "p = jax.core.Primitive('twice'); p.def_abstract_eval(lambda x, *, n: x)\n"
        "xla.register_translation(p, xla.lower_fun(lambda x, *, n: x * n, "
        "multiple_results=False, new_style=True), platform='cpu')\n"
        "assert jax.jit(lambda x: p.bind(x, n=3))(2.0) == 6\n"
        "xla.register_translation(p, lambda ctx, *_: None)\n"
        "assert jax.jit(lambda x: p.bind(x, n=5))(2.0) == 10\n"
        "q = jax.core.Primitive('built'); q.def_abstract_eval(lambda x: x)\n"
        "xla.register_translation(q, lambda ctx, *_: None)\n"
        "try: jax.jit(lambda x: q.bind(x))(2.0)\n"
        "except RefusedError: pass\nelse: raise AssertionError",
    ),
    "jax.interpreters.xla.canonicalize_dtype": "from jax.interpreters import xla\n"
    "assert xla.canonicalize_dtype(np.float64) == np.float32",
    "jax.interpreters.xla.wrap_name": "assert jax.xla.wrap_name('f', 'jvp') == 'jvp(f)'",
    **dict.fromkeys(
        ("jax.interpreters.batching.NotMapped", "jax.interpreters.batching.not_mapped"),
        "from jax.interpreters import batching\nseen = []\n"
        "p = jax.core.Primitive('scaled'); p.def_impl(lambda x, y: x * y)\n"
        "def rule(xs, dims):\n    seen.append(dims)\n    return xs[0] * xs[1], dims[0]\n"
        "batching.primitive_batchers[p] = rule\n"
        "assert jax.vmap(lambda x: p.bind(x, 2.0))(jnp.arange(3.0)).tolist() == [0, 2, 4]\n"
        "assert seen == [(0, batching.not_mapped)] and isinstance(seen[0][1], batching.NotMapped)",
    ),
    **dict.fromkeys(
        ("jax.interpreters.batching.BatchTrace", "jax.interpreters.batching.BatchTracer"),
        "from jax.interpreters import batching\nseen = []\n"
        "jax.vmap(lambda x: seen.append(isinstance(x, batching.BatchTracer)) or x)(jnp.ones(2))\n"
        "assert seen == [True] and isinstance(batching.BatchTrace, type)",
    ),
    "jax.interpreters.ad.CustomVJPException": "from jax.interpreters import ad\n"
    "f = jax.custom_vjp(lambda x: x); f.defvjp(lambda x: (x, ()), lambda _, g: (g,))\n"
    "try: jax.jvp(f, (1.0,), (1.0,))\nexcept (ad.CustomVJPException, TypeError): pass",
    "jax.interpreters.ad.config": "from jax.interpreters import ad\n"
    "assert ad.config is jax.config and not ad.config.jax_enable_checks",
    "jax.interpreters.ad.source_info_util": "from jax.interpreters import ad\n"
    "with ad.source_info_util.user_context(None): assert ad.source_info_util.current_name_stack",
    "jax.interpreters.ad.zeros_like_jaxval": "from jax.interpreters import ad\n"
    "assert ad.zeros_like_jaxval(jnp.ones(2)).tolist() == [0, 0]",
    "jax.interpreters.ad.zeros_like_p": "from jax.interpreters import ad\n"
    "assert ad.zeros_like_p not in {eqn.primitive for eqn in "
    "jax.make_jaxpr(jnp.zeros_like)(1.0).eqns}",
    "jax.interpreters.ad.reducing_transposes": "from jax.interpreters import ad\n"
    "assert jax.lax.add_p not in ad.reducing_transposes",
    **dict.fromkeys(
        (
            *("jax.interpreters.ad.standard_jvp", "jax.interpreters.ad.zero_jvp"),
            *("jax.interpreters.ad.linear_jvp", "jax.interpreters.ad.linear_transpose2"),
            *("jax.interpreters.ad.defjvp_zero", "jax.interpreters.ad.standard_jvp2"),
            *("jax.interpreters.ad.bilinear_transpose", "jax.interpreters.ad.custom_lin_p"),
        ),
        "from functools import partial\nfrom jax.interpreters import ad\n"
        "double = jax.core.Primitive('double'); double.def_impl(lambda x: 2 * x)\n"
        "times = jax.core.Primitive('times'); times.def_impl(lambda x, y: x * y)\n"
        "for p in (double, times): p.def_abstract_eval(lambda x, *_: x)\n"
        "ad.primitive_jvps[double] = partial(ad.linear_jvp, double)\n"
        "ad.primitive_transposes[double] = partial(\n"
        "    ad.linear_transpose2, lambda t, x: [double.bind(t)])\n"
        "assert jax.grad(lambda x: double.bind(x))(3.0) == 2\n"
        "ad.primitive_jvps[double] = partial(ad.standard_jvp, [lambda t, x: 4 * t], double)\n"
        "assert jax.jvp(double.bind, (3.0,), (1.0,)) == (6, 4)\n"
        "ad.primitive_jvps[double] = partial(\n"
        "    ad.standard_jvp2, [lambda t, ans, x: ans * t], double)\n"
        "assert jax.jvp(double.bind, (3.0,), (1.0,)) == (6, 6)\n"
        "ad.defjvp_zero(double)\n"
        "assert jax.jvp(double.bind, (3.0,), (1.0,)) == (6, 0)\n"
        "ad.primitive_jvps[double] = partial(ad.zero_jvp, double)\n"
        "assert jax.jvp(double.bind, (3.0,), (1.0,)) == (6, 0)\n"
        "ad.primitive_jvps[times] = partial(ad.standard_jvp, [\n"
        "    lambda t, x, y: times.bind(t, y), lambda t, x, y: times.bind(x, t)], times)\n"
        "ad.primitive_transposes[times] = partial(\n"
        "    ad.bilinear_transpose, lambda t, x, y: t * y, lambda t, x, y: x * t)\n"
        "assert jax.grad(lambda x: times.bind(x, 5.0))(3.0) == 5 and ad.custom_lin_p.name",
    ),
    "jax.interpreters.partial_eval.trace_to_jaxpr": "import jax.linear_util as lu\n"
    "from jax.interpreters import partial_eval as pe\n"
    "known = pe.PartialVal.known(jnp.ones(2))\n"
    "unknown = pe.PartialVal.unknown(jax.ShapedArray((3,), np.dtype('float32')))\n"
    "jaxpr, results, consts = pe.trace_to_jaxpr(\n"
    "    lu.wrap_init(lambda x, y: [x * 2, y + 1]), [known, unknown])\n"
    "assert results[0][0] is None and results[0][1].tolist() == [2, 2]\n"
    "assert results[1][0].shape == (3,) and len(jaxpr.eqns) == 1",
    **dict.fromkeys(
        (
            *("jax.interpreters.partial_eval.DynamicJaxprTrace",),
            *("jax.interpreters.partial_eval.JaxprTrace",),
        ),
        "from jax.interpreters import partial_eval as pe\n"
        "class Mine(pe.DynamicJaxprTrace): pass\nassert isinstance(pe.JaxprTrace, type)",
    ),
    **dict.fromkeys(
        (
            *("jax.interpreters.partial_eval.const_fold_rules",),
            *("jax.interpreters.partial_eval.custom_staging_rules",),
            *("jax.interpreters.partial_eval.forwarding_rules",),
        ),
        "from jax.interpreters import partial_eval as pe\np = jax.core.Primitive('p')\n"
        "for rules in (pe.const_fold_rules, pe.custom_staging_rules, pe.forwarding_rules):\n"
        "    rules[p] = None\n    del rules[p]",
    ),
    **dict.fromkeys(
        (
            *("jax.interpreters.partial_eval.move_binders_to_front",),
            *("jax.interpreters.partial_eval.partial_eval_jaxpr_custom",),
        ),
        "from jax.interpreters import partial_eval as pe\n"
        "closed = jax.make_jaxpr(lambda x, y: (x * 2, y + 1))(1.0, 2.0)\n"
        "moved = pe.move_binders_to_front(closed, [False, True])\n"
        "assert [v.aval for v in moved.jaxpr.invars]\n"
        "known, staged, unknown, *_ = pe.partial_eval_jaxpr_custom(\n"
        "    closed.jaxpr, [False, True], [False, True], False, False, lambda *_, **__: False)\n"
        "assert list(unknown) == [False, True]",
    ),
    "jax._src.clusters.TpuCluster": _imports("jax._src.clusters", "TpuCluster")
    + "assert isinstance(TpuCluster, type) and TpuCluster.is_env_present",
    "jax.interpreters.xla.device_put": "device = jax.devices()[1]\n"
    "(buffer,) = jax.interpreters.xla.device_put(np.ones(3), device)\n"
    "assert buffer.devices() == {device}",
    "jax.experimental.array": "from jax.experimental import array\n"
    "assert isinstance(jnp.ones(3), array.Array) and issubclass(type(jnp.ones(3)), array.Array)\n"
    "device = jax.devices()[0]\n"
    "sharding = jax.sharding.SingleDeviceSharding(device)\n"
    "made = array.Array(jax.ShapedArray((3,), np.dtype('float32')), sharding, [jnp.ones(3)])\n"
    "assert isinstance(made, array.Array) and not isinstance(3, array.Array)\n"
    "assert array.make_array_from_callback((3,), sharding, np.ones(3).__getitem__).sum() == 3\n"
    "assert array.make_array_from_single_device_arrays((3,), sharding, [made]).sum() == 3",
    "jax._src.device_array": "from jax._src.device_array import DeviceArray, make_device_array\n"
    "from jax._src import device_array\n"
    "assert isinstance(jnp.ones(3), DeviceArray) and device_array._DeviceArray is DeviceArray\n"
    "assert make_device_array(jnp.ones(3).aval, None, jnp.ones(3)).shape == (3,)",
    "jax.pmap": "x = jax.pmap(lambda v: v * 2)(np.ones((jax.local_device_count(), 3)));"
    "assert x[0].shape == (3,) and len(x[0].sharding.device_set) == 1",
    "jax.experimental.global_device_array._GdaFastPathArgs": _imports(
        "jax.experimental.global_device_array", "_GdaFastPathArgs"
    )
    + "assert issubclass(_GdaFastPathArgs, tuple)",
    **_use(
        _GDA_FILES,
        {
            "TS_CONTEXT": "assert 'file_io_concurrency' in str(TS_CONTEXT.spec.to_json())",
            "estimate_read_memory_footprint": "import tensorstore as ts\n"
            "t = ts.open({'driver': 'zarr', 'kvstore': 'memory://'}, create=True, dtype=ts.float32,"
            " shape=[8, 4], chunk_layout=ts.ChunkLayout(chunk_shape=[4, 4])).result()\n"
            "assert estimate_read_memory_footprint(t, ts.IndexDomain(shape=[2, 4])) == 64",
            "BarrierTimeoutError": "assert issubclass(BarrierTimeoutError, Exception)",
        },
    ),
}

WORKING = {**CORE, **NUMPY, **EVERYDAY, **HOST_CALLBACK}
