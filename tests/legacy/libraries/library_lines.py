"""A line of code for each name of `--libraries` that this project defines, which runs it.

`np` is imported. The facts are those of NumPy 1.23, optax 0.1.4 and Python 3.10.
"""

LINES = {
    "numpy.object": "assert np.array([1, None], np.object).dtype == object and np.object is object",
    "numpy.int": "assert np.int is int and np.zeros(2, np.int).dtype == np.int64",
    "numpy.float": "assert np.float is float and np.float('1.5') == 1.5",
    "numpy.complex": "assert np.complex is complex",
    "numpy.str": "assert np.str is str and np.unicode is str",
    "numpy.float_": "assert np.float_ is np.float64 and np.complex_ is np.complex128",
    "numpy.bool8": "assert np.bool8 is np.bool_ and np.string_ is np.bytes_",
    "numpy.product": "assert np.product([2, 3]) == 6 and list(np.cumproduct([2, 3])) == [2, 6]",
    "numpy.alltrue": "assert not np.alltrue([1, 0]) and np.sometrue([1, 0])",
    "numpy.in1d": "assert np.in1d([[1, 2], [3, 4]], [2, 3]).tolist() == [False, True, True, False]",
    "numpy.trapz": "assert np.trapz([1, 3]) == 2 and np.row_stack([[1], [2]]).shape == (2, 1)",
    "numpy.NINF": "assert np.NINF == -np.PINF == -np.Inf and np.isnan(np.NaN)",
    "numpy.NZERO": "assert str(np.NZERO) == '-0.0' and str(np.PZERO) == '0.0'",
    "numpy.cast": "assert np.cast['float32']([1]).dtype == np.cast[np.float32](1).dtype == 'f4'",
    "numpy.asfarray": "assert np.asfarray([1]).dtype == np.asfarray([1], np.int32).dtype == float\n"
    "assert np.asfarray([1], np.complex64).dtype == np.complex64",
    "numpy.asscalar": "assert type(np.asscalar(np.float32(1))) is float and np.alen(3) == 1",
    "numpy.msort": "assert np.msort([[2, 1], [1, 3]]).tolist() == [[1, 1], [2, 3]]",
    "numpy.loads": "import pickle\nassert np.loads(pickle.dumps(3)) == 3",
    "numpy.safe_eval": "assert np.safe_eval('[1, 2]') == [1, 2]",
    "numpy.sctypes": "assert np.sctypes['int'] == [np.int8, np.int16, np.int32, np.int64]\n"
    "assert np.sctypes['float'][:3] == [np.float16, np.float32, np.float64]\n"
    "assert np.nbytes[np.float32] == 4",
    "numpy.issubclass_": "assert np.issubclass_(bool, int) and not np.issubclass_(1, int)",
    "numpy.issctype": "assert np.issctype(np.int8) and not np.issctype('i1')\n"
    "assert not np.issctype(object)",
    "numpy.issubsctype": "assert np.issubsctype('f4', np.floating)",
    "numpy.obj2sctype": "assert np.obj2sctype(np.zeros(1, 'i2')) is np.obj2sctype('i2')\n"
    "assert np.obj2sctype('none of them', default=3) == 3",
    "numpy.sctype2char": "assert np.sctype2char(np.float32) == 'f'",
    "numpy.maximum_sctype": "assert np.maximum_sctype(np.int8) is np.int64",
    "numpy.find_common_type": "t = np.find_common_type\n"
    "assert t([np.float32], [np.int64, np.float64]) == np.float32\n"
    "assert t([np.int8, np.uint8], []) == np.int16 and t([], ['i4', 'f4']) == np.float64\n"
    "assert t(['i8'], ['f4']) == np.float64 and t(['i8'], ['c8']) == np.complex128\n"
    "assert t([], []) is None and t(['f4', 'U1'], []) == object",
    "numpy.math": "assert np.math.pi == np.pi",
    "numpy.AxisError": "assert issubclass(np.AxisError, IndexError)\n"
    "assert issubclass(np.VisibleDeprecationWarning, UserWarning)",
    "collections.Mapping": "import collections\n"
    "assert isinstance({}, collections.Mapping) and issubclass(list, collections.Sequence)",
    "inspect.getargspec": "import inspect\n"
    "spec = inspect.getargspec(lambda x, y=1, *z: x)\n"
    "assert spec == (['x', 'y'], 'z', None, (1,)) and spec.defaults == (1,)\n"
    "try: inspect.getargspec(lambda *, x: x)\n"
    "except ValueError: pass\n"
    "else: raise AssertionError",
    "pipes": "import pipes\nassert pipes.quote('a b') == \"'a b'\"",
    "imp": "import imp, json, sys, tempfile\n"
    "file = tempfile.NamedTemporaryFile('w', suffix='.py')\n"
    "assert file.write('A = 3') and not file.flush()\n"
    "assert imp.load_source('loaded_by_imp', file.name).A == 3 and imp.reload(json) is json\n"
    "assert sys.modules.pop('loaded_by_imp') and imp.new_module('m').__name__ == 'm'",
    "pkg_resources": "import pkg_resources as p\n"
    "assert p.get_distribution('numpy>1').version == np.__version__\n"
    "assert p.parse_version('1.10') > p.parse_version('1.9') and p.require('numpy')[0].key\n"
    "assert p.resource_exists('numpy', 'linalg/__init__.py')\n"
    "assert b'import' in p.resource_string('numpy', '__init__.py')\n"
    "assert 'linalg' in p.resource_listdir('numpy', '') and p.resource_isdir('numpy', 'linalg')\n"
    "assert list(p.iter_entry_points('pytest11'))\n"
    "for wrong, error in (('no-such', p.DistributionNotFound), ('numpy<1', p.VersionConflict)):\n"
    "    try: p.get_distribution(wrong)\n"
    "    except error: pass\n"
    "    else: raise AssertionError",
    "importlib_resources": "import importlib_resources\n"
    "assert importlib_resources.files('numpy').joinpath('__init__.py').is_file()",
}

OPTAX_LINES = {
    "optax.ScaleByFromageState": "import optax\nassert optax.ScaleByFromageState(1).count == 1",
    "optax.MaybeUpdateState": "import optax, jax\n"
    "t = optax.maybe_update(optax.scale(2.0), should_update_fn=lambda step: step % 2 == 0)\n"
    "state = t.init({'w': 1.0})\n"
    "assert isinstance(state, optax.MaybeUpdateState)\n"
    "first, state = t.update({'w': 1.0}, state)\n"
    "assert first['w'] == 2 and t.update({'w': 1.0}, state)[0]['w'] == 1\n"
    "assert jax.tree.leaves(state) == [1]",
    "optax.additive_weight_decay": "import optax\n"
    "t = optax.additive_weight_decay(0.5)\n"
    "assert t.update({'w': 1.0}, t.init({'w': 2.0}), {'w': 2.0})[0] == {'w': 2.0}\n"
    "assert isinstance(t.init({}), optax.AdditiveWeightDecayState)",
    "optax.FactoredParameterStats": "import optax\n"
    "assert optax.FactoredParameterStats(1, 2, 3, 4).v == 3",
    "optax.hvp": "import optax\nfrom optax import fisher_diag, hessian_diag, hvp",
    "optax.experimental": "from optax import experimental as e\n"
    "assert e.named_chain and e.split_real_and_imaginary and e.GradientTransformationWithExtraArgs",
    "optax._src": "from optax._src import clipping, loss, privacy, second_order\n"
    "from optax._src import transform, wrappers\n"
    "assert clipping.clip and loss.l2_loss and transform.CentralState and wrappers.maybe_update",
    "flax.optim": "from flax import optim\nassert optim.DynamicScale().scale > 1",
    "flax.linen.ConvLSTM": "import flax.linen as nn\nassert nn.ConvLSTM(4, (3, 3)).features == 4",
}

EQUINOX_LINES = {
    "equinox.module": "from equinox.module import Module, Static, static_field\n"
    "assert Static(3).value == 3",
    "equinox.compile_utils": "from equinox.compile_utils import compile_cache, get_fun_names\n"
    "from equinox.compile_utils import hashable_combine, hashable_partition\n"
    "def f(): pass\n"
    "assert get_fun_names(f) == ('f', 'f')\n"
    "parts = hashable_partition((np.ones(2), 3), lambda x: hasattr(x, 'shape'))\n"
    "assert hashable_combine(*parts)[1] == 3",
    "equinox.custom_types": "from equinox.custom_types import BoolAxisSpec, TreeDef\n"
    "import jax\nassert isinstance(jax.tree.structure(0), TreeDef)",
    "equinox.filters": "from equinox.filters import combine, filter, is_array, partition\n"
    "from equinox import serialisation, tree, update\n"
    "from equinox.grad import filter_grad\nfrom equinox.jit import filter_jit\n"
    "from equinox.vmap_pmap import filter_vmap\nimport equinox.pretty_print\n"
    "assert tree.tree_at and serialisation.tree_serialise_leaves and update.apply_updates",
    "equinox.nn.AvgPool1D": "import equinox\n"
    "assert equinox.nn.AvgPool1D(2)(np.ones((1, 4))).shape == (1, 3)",
}
