"""xlashard: arrays over many devices, their shardings, and pjit, on today's JAX.

Example:
    >>> import jax
    >>> import numpy as np
    >>> import xlashard
    >>> from xlashard import Mesh, NamedSharding, P
    >>> mesh = Mesh(np.array(jax.devices()), ("data",))
    >>> x = xlashard.device_put(np.ones((16, 4)), NamedSharding(mesh, P("data")))
    >>> xlashard.pjit(lambda x: x.sum())(x)
    Array(64., dtype=float32)
"""

import os as _os
import sys as _sys
import typing as _typing


def _is_command_line() -> bool:
    """Return whether this process is `xlashard COMMAND` or `python -m xlashard COMMAND`.

    While Python looks for the module of `-m`, `sys.argv[0]` is `-m`. The original arguments are
    compared too: a process spawned by `multiprocessing` takes over `sys.argv`.
    """
    words = _sys.argv
    if not words or len(words) > len(_sys.orig_argv):
        return False
    first = _sys.orig_argv[-len(words)]
    if words[0] == "-m":
        return first.removeprefix("-m") == __name__
    stem = _os.path.splitext(_os.path.basename(first))[0]
    return first == words[0] and stem == __name__


# Importing JAX takes 0.7 s: `xlashard --help` should not wait for it, and `xlashard doctor` has to
# work where JAX cannot be imported. But Python imports this module before `xlashard.cli`. In the
# process of the command line, and in no other, the rest of this module is therefore run when one of
# its names is first read; `cli.main` reads one before it runs a command. (A package of its own for
# the command line would not help `python -m xlashard`.)
if not _typing.TYPE_CHECKING and "_waited" not in globals() and _is_command_line():
    _waited = True

    def __getattr__(name: str) -> object:
        """Run the rest of this module, which defines the name."""
        if name.startswith("__") and name != "__version__":
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name)
        module = _sys.modules[__name__]
        waiting = globals().pop("__getattr__")
        try:
            __spec__.loader.exec_module(module)
        except BaseException:
            module.__getattr__ = waiting
            raise
        return getattr(module, name)

else:
    from jax import make_mesh, set_mesh
    from jax.sharding import AxisType, get_abstract_mesh, get_mesh, use_abstract_mesh

    from xlashard.config import read_flags as _read_flags
    from xlashard.errors import ConfigError as _ConfigError
    from xlashard.errors import XlashardError as _XlashardError

    # Before all else is imported, so that the error has no frames of those imports.
    try:
        _flags = _read_flags(_os.environ)
    except _ConfigError as _error:
        raise _error.with_traceback(None) from None

    from xlashard._jax import warn_of_untested_version as _warn_of_untested_version

    _warn_of_untested_version()

    from xlashard._jax.registration import apply_flags as _apply_flags
    from xlashard._jax.registration import install as _install
    from xlashard._jax.runtime.dispatch import Wrappers as _Wrappers
    from xlashard._jax.trace.observed_programs import watch_misses as _watch_misses
    from xlashard._version import __version__
    from xlashard.array import (
        Array,
        device_put,
    )
    from xlashard.array import wrap_kinds as _wrap_kinds
    from xlashard.array import wrap_tree as _wrap_tree
    from xlashard.array.core.closure_names import check_constant as _check_constant
    from xlashard.array.core.handles import wrap_first as _wrap_first
    from xlashard.lazily import deferred as _deferred
    from xlashard.lazily import on_demand as _on_demand
    from xlashard.pjit.api import explain_recompile, jit, pjit
    from xlashard.pjit.constraint import with_sharding_constraint
    from xlashard.pjit.recompile.compile_log import JIT_LOGS as _JIT_LOGS
    from xlashard.pjit.shardings.automatic import use_planner as _use_planner
    from xlashard.pjit.shardings.resources import AUTO, UNSPECIFIED
    from xlashard.program.consistency import CONSISTENCY as _CONSISTENCY
    from xlashard.program.consistency import Policy as _Policy
    from xlashard.sharding import (
        AbstractMesh,
        GSPMDSharding,
        Mesh,
        NamedSharding,
        PartitionSpec,
        Sharding,
        SingleDeviceSharding,
    )
    from xlashard.sharding import PmapSharding as _PmapSharding

    if _typing.TYPE_CHECKING:
        from xlashard import errors as errors
        from xlashard import hlo as hlo
        from xlashard import multihost as multihost
        from xlashard import numpy as numpy
        from xlashard import testing as testing
        from xlashard import tpu as tpu
        from xlashard.array.constructors import (
            make_array_from_callback,
            make_array_from_process_local_data,
        )
        from xlashard.array.core.handles import key_shards, live_arrays
        from xlashard.array.core.shard import Shard
        from xlashard.array.device_buffers import (
            make_array_from_single_device_arrays,
        )
        from xlashard.array.device_buffers import make_device_array as make_device_array
        from xlashard.array.device_buffers import (
            make_sharded_device_array as make_sharded_device_array,
        )
        from xlashard.array.device_put import device_get
        from xlashard.array.dlpack import from_dlpack
        from xlashard.array.reshard.report import ReshardReport, reshard_plan
        from xlashard.array.stacked import device_put_replicated as device_put_replicated
        from xlashard.array.stacked import device_put_sharded as device_put_sharded
        from xlashard.array.stacked import unstacked_shards as unstacked_shards
        from xlashard.auto.auto_shard import auto_shard
        from xlashard.auto.plan.auto_plan import AutoPlan
        from xlashard.pictures import ShardingPicture, TreePicture, visualize
        from xlashard.pjit.api import reshard, shard_map
        from xlashard.pjit.padding import pad_to_mesh, unpad
        from xlashard.pjit.recompile.recompile_report import RecompileReport
        from xlashard.pjit.report.explain import explain
        from xlashard.pjit.report.program_report import ProgramReport
        from xlashard.pjit.shardings.resources import FROM_GDA as FROM_GDA
        from xlashard.pjit.stages.bound_step import BoundStep
        from xlashard.pjit.stages.compiled import Compiled
        from xlashard.pjit.stages.recorded import RecordedProgram, record_programs
        from xlashard.pjit.stages.stablehlo import StableHLOProgram, compile_stablehlo
        from xlashard.pjit.stages.traced import Lowered, Traced
        from xlashard.preflights import PreflightReport, preflight
        from xlashard.preflights.sweep.sweep_report import SweepReport
        from xlashard.preflights.sweep.sweep_run import preflight_sweep
        from xlashard.sharding import Chunked as Chunked
        from xlashard.sharding import NoSharding as NoSharding
        from xlashard.sharding import OpShardingSharding as OpShardingSharding
        from xlashard.sharding import PmapSharding as PmapSharding
        from xlashard.sharding import Replicated as Replicated
        from xlashard.sharding import ShardedAxis as ShardedAxis
        from xlashard.sharding import ShardingSpec as ShardingSpec
        from xlashard.sharding import Unstacked as Unstacked
        from xlashard.sharding import XLACompatibleSharding as XLACompatibleSharding
    else:
        # Names that `__all__` lacks are of 2022; `xlashard.legacy` lists them.
        __getattr__, _ = _on_demand(
            __name__,
            globals(),
            {
                "xlashard.array.constructors": (
                    "make_array_from_callback",
                    "make_array_from_process_local_data",
                ),
                "xlashard.array.core.handles": ("key_shards", "live_arrays"),
                "xlashard.array.core.shard": ("Shard",),
                "xlashard.array.device_buffers": (
                    "make_array_from_single_device_arrays",
                    "make_device_array",
                    "make_sharded_device_array",
                ),
                "xlashard.array.device_put": ("device_get",),
                "xlashard.array.dlpack": ("from_dlpack",),
                "xlashard.array.reshard.report": ("ReshardReport", "reshard_plan"),
                "xlashard.array.stacked": (
                    "device_put_replicated",
                    "device_put_sharded",
                    "unstacked_shards",
                ),
                "xlashard.auto.auto_shard": ("auto_shard",),
                "xlashard.auto.plan.auto_plan": ("AutoPlan",),
                "xlashard.hlo": ("hlo",),
                "xlashard.multihost": ("multihost",),
                "xlashard.numpy": ("numpy",),
                "xlashard.pictures": ("ShardingPicture", "TreePicture", "visualize"),
                "xlashard.pjit.api": ("reshard", "shard_map"),
                "xlashard.pjit.padding": ("pad_to_mesh", "unpad"),
                "xlashard.pjit.recompile.recompile_report": ("RecompileReport",),
                "xlashard.pjit.report.explain": ("explain",),
                "xlashard.pjit.report.program_report": ("ProgramReport",),
                "xlashard.pjit.shardings.resources": ("FROM_GDA",),
                "xlashard.pjit.stages.bound_step": ("BoundStep",),
                "xlashard.pjit.stages.compiled": ("Compiled",),
                "xlashard.pjit.stages.recorded": ("RecordedProgram", "record_programs"),
                "xlashard.pjit.stages.stablehlo": ("StableHLOProgram", "compile_stablehlo"),
                "xlashard.pjit.stages.traced": ("Lowered", "Traced"),
                "xlashard.sharding": (
                    "Chunked",
                    "NoSharding",
                    "OpShardingSharding",
                    "PmapSharding",
                    "Replicated",
                    "ShardedAxis",
                    "ShardingSpec",
                    "Unstacked",
                    "XLACompatibleSharding",
                ),
                "xlashard.testing": ("testing",),
                "xlashard.tpu": ("tpu",),
                "xlashard.preflights": ("PreflightReport", "preflight"),
                "xlashard.preflights.sweep.sweep_report": ("SweepReport",),
                "xlashard.preflights.sweep.sweep_run": ("preflight_sweep",),
            },
        )

    def __dir__() -> list[str]:
        """List the public names and modules."""
        return sorted((*__all__, "errors", "hlo", "multihost", "numpy", "testing", "tpu"))

    # The planner of AUTO stands on the compilers, which a program without AUTO doesn't import.
    _use_planner(_deferred("xlashard.auto.planner"))
    _XlashardError.docs_url = _flags.docs_url
    _apply_flags(_flags)
    _CONSISTENCY.use(
        _Policy(_flags.check_programs, _flags.check_jit_programs, _flags.programs_timeout)
    )
    _install(
        Array,
        _Wrappers(_wrap_first, _wrap_tree, _wrap_kinds),
        (NamedSharding, _PmapSharding, SingleDeviceSharding),
        _check_constant,
    )
    _watch_misses(_JIT_LOGS.observe)
    if _flags.check_jit_programs:
        from xlashard.multihost.consistency import watch_jit_programs as _watch_jit_programs

        _watch_jit_programs()

    P = PartitionSpec

__all__ = [
    "AUTO",
    "UNSPECIFIED",
    "AbstractMesh",
    "Array",
    "AutoPlan",
    "AxisType",
    "BoundStep",
    "Compiled",
    "GSPMDSharding",
    "Lowered",
    "Mesh",
    "NamedSharding",
    "P",
    "PartitionSpec",
    "PreflightReport",
    "ProgramReport",
    "RecompileReport",
    "RecordedProgram",
    "ReshardReport",
    "Shard",
    "Sharding",
    "ShardingPicture",
    "SingleDeviceSharding",
    "StableHLOProgram",
    "SweepReport",
    "Traced",
    "TreePicture",
    "__version__",
    "auto_shard",
    "compile_stablehlo",
    "device_get",
    "device_put",
    "explain",
    "explain_recompile",
    "from_dlpack",
    "get_abstract_mesh",
    "get_mesh",
    "jit",
    "key_shards",
    "live_arrays",
    "make_array_from_callback",
    "make_array_from_process_local_data",
    "make_array_from_single_device_arrays",
    "make_mesh",
    "pad_to_mesh",
    "pjit",
    "preflight",
    "preflight_sweep",
    "record_programs",
    "reshard",
    "reshard_plan",
    "set_mesh",
    "shard_map",
    "unpad",
    "use_abstract_mesh",
    "visualize",
    "with_sharding_constraint",
]
