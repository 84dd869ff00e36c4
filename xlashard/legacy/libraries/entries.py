"""Entries of the names that libraries other than JAX took away."""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec

from xlashard.legacy.entries.entry import Entry, EntryTable, moved, read_table, works
from xlashard.legacy.module_shims import has_module

_HERE = __name__.rpartition(".")[0]
_NUMPY = f"{_HERE}.numpy_names:"
_OPTAX = f"{_HERE}.optax_names:"
_PYTHON = f"{_HERE}.python_names:"


def _list_renamed(gone: str, library: str, **names: str) -> dict[str, Entry]:
    """Return the entries of names that a library has under another name, by the old name."""
    return {old: works(gone, f"{library}.{new}", f"{library}:{new}") for old, new in names.items()}


def _list_builtins(gone: str, **names: str) -> dict[str, Entry]:
    return {old: works(gone, new, f"builtins:{new}") for old, new in names.items()}


def _list_own(gone: str, home: str, **names: str) -> dict[str, Entry]:
    """Return the entries of names that a file here defines, by name, from today's code."""
    return {name: works(gone, today, f"{home}{name}") for name, today in names.items()}


_NUMPY_TABLE = {
    "numpy": {
        **_list_builtins(
            "1.24",
            **{name: name for name in ("object", "int", "float", "complex", "str")},
            unicode="str",
        ),
        **_list_renamed("1.24", "numpy", typeDict="sctypeDict"),
        **_list_renamed("1.18", "numpy", rank="ndim"),
        **_list_renamed(
            "2.0",
            "numpy",
            bool8="bool_",
            float_="float64",
            complex_="complex128",
            string_="bytes_",
            unicode_="str_",
            int0="intp",
            uint0="uintp",
            object0="object_",
            str0="str_",
            bytes0="bytes_",
            void0="void",
            singlecomplex="complex64",
            cfloat="complex128",
            longfloat="longdouble",
            longcomplex="clongdouble",
            clongfloat="clongdouble",
            Inf="inf",
            Infinity="inf",
            infty="inf",
            PINF="inf",
            NaN="nan",
            NAN="nan",
            product="prod",
            cumproduct="cumprod",
            alltrue="all",
            sometrue="any",
            round_="round",
            mat="asmatrix",
            ModuleDeprecationWarning="exceptions.ModuleDeprecationWarning",
            VisibleDeprecationWarning="exceptions.VisibleDeprecationWarning",
            ComplexWarning="exceptions.ComplexWarning",
            RankWarning="exceptions.RankWarning",
            AxisError="exceptions.AxisError",
            TooHardError="exceptions.TooHardError",
            DataSource="lib.npyio.DataSource",
            byte_bounds="lib.array_utils.byte_bounds",
        ),
        "math": works("2.0", "import math", "math:"),
        **_list_renamed("2.4", "numpy", trapz="trapezoid"),
        **_list_renamed("2.5", "numpy", row_stack="vstack"),
        **_list_own(
            "2.0",
            _NUMPY,
            NINF="-numpy.inf",
            PZERO="0.0",
            NZERO="-0.0",
            safe_eval="ast.literal_eval(text)",
            sctypes="numpy.sctypeDict",
            nbytes="numpy.dtype(kind).itemsize",
            cast="numpy.asarray(x, dtype)",
            asfarray="numpy.asarray(a, float)",
            msort="numpy.sort(a, axis=0)",
            issubclass_="issubclass(a, b)",
            issctype="issubclass(kind, numpy.generic)",
            issubsctype="numpy.issubdtype(a, b)",
            obj2sctype="numpy.dtype(rep).type",
            sctype2char="numpy.dtype(kind).char",
            maximum_sctype="numpy.longdouble",
            find_common_type="numpy.result_type(*types)",
        ),
        **_list_own("1.23", _NUMPY, asscalar="a.item()", alen="len(a)", loads="pickle.loads(data)"),
        **_list_own("2.4", _NUMPY, in1d="numpy.isin(a, b)"),
    }
}

_OPTAX_TABLE = {
    "optax": {
        **_list_renamed(
            "0.1.8",
            "optax",
            AdditiveWeightDecayState="AddDecayedWeightsState",
            additive_weight_decay="add_decayed_weights",
        ),
        **_list_renamed("0.2.5", "optax", MaybeUpdateState="ConditionallyTransformState"),
        **_list_own("0.1.5", _OPTAX, ScaleByFromageState="optax.ScaleByScheduleState"),
        **_list_own("0.1.0", _OPTAX, FactoredParameterStats="optax.FactoredState"),
        **_list_own("0.2.5", _OPTAX, maybe_update="optax.conditionally_transform(inner, f)"),
        **moved("0.1.8", "optax.second_order", "fisher_diag", "hessian_diag", "hvp"),
    },
    "optax.experimental": {
        # Releases before 0.2.5 have no module of this name, later ones another one.
        "": works("0.1.8", "import optax", "optax"),
        **moved("0.1.8", "optax.contrib", "split_real_and_imaginary", "SplitRealAndImaginaryState"),
        **moved("0.1.8", "optax", "named_chain", "GradientTransformationExtraArgs"),
        "GradientTransformationWithExtraArgs": works(
            "0.1.8",
            "optax.GradientTransformationExtraArgs",
            "optax:GradientTransformationExtraArgs",
        ),
    },
    "optax._src.transform": _list_renamed(
        "0.1.8",
        "optax",
        AdditiveWeightDecayState="AddDecayedWeightsState",
        additive_weight_decay="add_decayed_weights",
        CentralState="EmptyState",
    ),
    "optax._src.wrappers": {
        **_list_renamed("0.2.5", "optax", MaybeUpdateState="ConditionallyTransformState"),
        **_list_own("0.2.5", _OPTAX, maybe_update="optax.conditionally_transform(inner, f)"),
    },
    "optax._src.clipping": {
        "": works("0.2.6", "import optax.transforms", "optax.transforms"),
    },
    "optax._src.loss": {"": works("0.1.8", "import optax.losses", "optax.losses")},
    "optax._src.privacy": {"": works("0.1.8", "import optax.contrib", "optax.contrib")},
    "optax._src.second_order": {
        "": works("0.1.8", "import optax.second_order", "optax.second_order")
    },
}

_FLAX_TABLE = {
    "flax.optim": {
        "": works("0.6.0", "import optax", "flax.training.dynamic_scale").but(
            "only DynamicScale is there again: the optimizers are those of optax"
        ),
    },
    "flax.linen": {
        "ConvLSTM": works("0.7.0", "flax.linen.ConvLSTMCell", "flax.linen:ConvLSTMCell").but(
            "initialize_carry takes a key and the input's shape, and is no static method"
        )
    },
}

_CHEX_TABLE = {
    "chex": {
        f"assert_tree_all_{what}": works(
            "0.1.83",
            f"chex.assert_trees_all_{what}({arguments})",
            f"chex:assert_trees_all_{what}",
        )
        for what, arguments in {
            "close": "*trees",
            "equal_structs": "*trees",
            "equal_shapes": "*trees",
            "equal_comparator": "f, g, *trees",
        }.items()
    }
}

_EQUINOX_TABLE = {
    **{
        f"equinox.{old}": {"": works("0.10.2", "import equinox", f"equinox.{new}")}
        for old, new in {
            "callback": "_callback",
            "eval_shape": "_eval_shape",
            "filters": "_filters",
            "grad": "_ad",
            "jit": "_jit",
            "make_jaxpr": "_make_jaxpr",
            "module": "_module",
            "pretty_print": "_pretty_print",
            "serialisation": "_serialisation",
            "tree": "_tree",
            "update": "_update",
            "vmap_pmap": "_vmap_pmap",
        }.items()
    },
    "equinox.compile_utils": {
        "": works("0.10.2", "import equinox", "equinox._compile_utils"),
        "get_fun_names": works(
            "0.10.2", "f.__name__, f.__qualname__", "equinox._compile_utils:get_fn_names"
        ),
    },
    "equinox.custom_types": {
        "": works("0.10.2", "import equinox", "equinox._custom_types"),
        "BoolAxisSpec": works("0.10.2", "bool | Callable[[Any], bool]", "typing:Any"),
        "ResolvedBoolAxisSpec": works("0.10.2", "bool", "builtins:bool"),
        "TreeDef": works("0.10.2", "jax.tree_util.PyTreeDef"),
    },
    "equinox.nn": _list_renamed(
        "0.10.0",
        "equinox.nn",
        **{
            f"{kind}Pool{rank}D": f"{kind}Pool{rank}d"
            for kind in ("Avg", "Max")
            for rank in (1, 2, 3)
        },
    ),
}

_ABSTRACT = (
    *("AsyncGenerator", "AsyncIterable", "AsyncIterator", "Awaitable", "ByteString", "Callable"),
    *("Collection", "Container", "Coroutine", "Generator", "Hashable", "ItemsView", "Iterable"),
    *("Iterator", "KeysView", "Mapping", "MappingView", "MutableMapping", "MutableSequence"),
    *("MutableSet", "Reversible", "Sequence", "Set", "Sized", "ValuesView"),
)
_PYTHON_TABLE = {
    "collections": moved("3.10", "collections.abc", *_ABSTRACT),
    "inspect": _list_own(
        "3.11", _PYTHON, ArgSpec="inspect.FullArgSpec", getargspec="inspect.getfullargspec(func)"
    ),
    "pipes": {"": works("3.13", "import shlex", "shlex")},
    "imp": {"": works("3.12", "import importlib", f"{_HERE}.imp")},
}

LIBRARIES: Mapping[str, EntryTable] = {
    "Python": _PYTHON_TABLE,
    "NumPy": _NUMPY_TABLE,
    "optax": _OPTAX_TABLE,
    "flax": _FLAX_TABLE,
    "chex": _CHEX_TABLE,
    "equinox": _EQUINOX_TABLE,
    "setuptools": {
        "pkg_resources": {
            "": works("82", "import importlib.metadata", f"{_HERE}.pkg_resources"),
        },
    },
    # A package that JAX's libraries required in 2022, so that it was there.
    "orbax": {
        "importlib_resources": {
            "": works("0.5.10", "import importlib.resources", "importlib.resources")
        },
    },
}
"""Tables of entries, by the library that took the names away."""


@lru_cache(maxsize=1)
def list_library_entries() -> dict[str, Entry]:
    """Return the entries of all libraries, by the name that programs use.

    Example:
        >>> entry = list_library_entries()["numpy.object"]
        >>> entry.library, entry.gone, entry.today
        ('NumPy', '1.24', 'object')
    """
    return {entry.name: entry for entry in _read_tables()}


def _read_tables() -> Iterator[Entry]:
    for library, table in LIBRARIES.items():
        for entry in read_table(_HERE, table):
            yield replace(entry, library=library)


def find_missing_entries() -> dict[str, Entry]:
    """Return the entries whose module is missing, or is installed and may lack the name.

    Nothing is imported.
    """
    listed = list_library_entries()
    missing = {name: entry for name, entry in listed.items() if _is_missing_module(entry, listed)}
    for name, entry in listed.items():
        parent = name.rpartition(".")[0]
        # The parent may be a module that is missing as well.
        homes = (parent, parent.rpartition(".")[0])
        if not entry.is_module and any(has_module(home) for home in homes if home):
            missing[name] = entry
    return missing


def _is_missing_module(entry: Entry, listed: Mapping[str, Entry]) -> bool:
    """Return True for a module that can't be imported, though the package around it can."""
    root = entry.name.partition(".")[0]
    if not entry.is_module:
        return False
    if root not in sys.modules and find_spec(root) is None:
        return root in listed
    # A package that another finder has is there as a whole.
    return has_module(root) and not has_module(entry.name)
