"""Read a `jax.stages.Lowered` as a jaxpr that calls its StableHLO module."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import jax

from xlashard._jax import stablehlo_modules as modules
from xlashard._jax import stablehlo_parse
from xlashard._jax.lowering import device_count, uses_shardy
from xlashard._jax.private import (
    core,
    func_dialect,
    ir,
    mlir,
    named_sharding,
    sdy,
    source_info_util,
)
from xlashard._jax.runtime.shardings import AbstractMesh
from xlashard._jax.trace import jitted
from xlashard._jax.trace.jaxprs import from_function
from xlashard._jax.trace.tracing import replace_fields, struct_of
from xlashard._jax.tree_definitions import in_default_registry
from xlashard.errors import CompileError
from xlashard.support.lazily import dataclass

_PORTABLE = (
    "Sharding",
    "SPMD",
    "annotate_device_placement",
    "xla.sdy.",
    "mhlo.",
    "shape_assertion",
)
"""Targets of custom calls that mean the same on every platform, or how they begin."""


@dataclass(frozen=True, eq=False)
class StableHLOModule:
    """Module of a lowered function.

    Attributes:
        name: The function's name.
        bytecode: MLIR bytecode, with source locations.
        platform: The platform that it was lowered for.
        num_partitions: The number of devices that it was lowered for.
    """

    name: str
    bytecode: bytes
    platform: str
    num_partitions: int


def why_not_callable(lowered: Any) -> str:
    """Return why the module of a `jax.stages.Lowered` can't be called; empty if it can."""
    lowering = lowered._lowering
    parts, module = lowering.compile_args, lowering.stablehlo()
    if len(lowering._platforms) != 1:
        return f"was lowered for several platforms, {', '.join(lowering._platforms)}"
    if parts["ordered_effects"] or parts["host_callbacks"] or parts["keepalive"]:
        return "calls Python functions or has ordered effects"
    if any(mesh.device_ids for mesh in stablehlo_parse.named_meshes(module)):
        return "has meshes of different device orders"
    return ""


def read_lowered(lowered: Any) -> jitted.JaxProgram:
    """Return a `jax.stages.Lowered` as a program whose jaxpr calls its module.

    The shardings of arguments and results are those that it was lowered with. Abstract values lose
    explicit shardings, which the shardings of the results contain.

    Args:
        lowered: A stage for which `why_not_callable` returns nothing.
    """
    lowering = lowered._lowering
    parts, count = lowering.compile_args, lowered.in_tree.num_leaves
    infos, first = jax.tree_util.tree_leaves(lowered.args_info), len(lowering.const_args)
    avals = [_plain(info._aval) for info in infos]
    out_avals = tuple(map(_plain, parts["global_out_avals"]))
    kept = [first + i in parts["kept_var_idx"] for i in range(count)]
    ins, outs = jitted.read_requests(lowered)
    name, module = jitted.name_and_devices(lowered)[0], lowering.stablehlo()
    called = StableHLOModule(
        name=name,
        bytecode=modules.to_bytecode(module),
        platform=lowering._platforms[0],
        num_partitions=parts["num_devices"],
    )
    meshes = tuple(
        AbstractMesh(*reversed(tuple(zip(*mesh.axes, strict=True))))
        for mesh in stablehlo_parse.named_meshes(module)
    )
    # Inside a shard_map, types depend on the sizes of mesh axes.
    fixes_axes = any(
        op.name == "sdy.manual_computation" for op in modules.operations(module.operation)
    )
    if not uses_shardy():
        inner = filter(_is_named, parts["intermediate_shardings"])
        meshes, fixes_axes = tuple(dict.fromkeys(s.mesh for s in inner)), True

    def call(*args: Any) -> Sequence[Any]:
        operands = [*lowering.const_args, *compress(args, kept)]
        return _module_call().bind(
            *operands, module=called, out_avals=out_avals, meshes=meshes, fixes_axes=fixes_axes
        )

    jaxpr = from_function(call, [struct_of(aval, None) for aval in avals], name)
    # The line of the call above is not the user's.
    unknown = source_info_util.new_source_info()
    jaxpr = replace_fields(jaxpr, eqns=[eqn.replace(source_info=unknown) for eqn in jaxpr.eqns])
    debug = parts["all_args_info"].debug_info
    jaxpr = replace_fields(
        jaxpr,
        debug_info=debug._replace(
            arg_names=debug.safe_arg_names(first + count)[first:],
            result_paths=debug.safe_result_paths(len(out_avals)),
        ),
    )
    donated = tuple(info.donated for info in infos)
    params = {
        "name": name,
        "in_shardings": _of_all(
            kept, map(_request, ins[first:], avals), named_sharding.UNSPECIFIED
        ),
        "out_shardings": outs,
        "in_layouts": _of_all(kept, parts["in_layouts"][first:], None),
        "out_layouts": tuple(parts["out_layouts"]),
        "donated_invars": donated,
        "ctx_mesh": parts["context_mesh"],
        "keep_unused": False,
        "compiler_options_kvs": lowering._compiler_options_kvs,
    }
    values = tuple(struct_of(aval, None) for aval in avals)
    trees = in_default_registry(lowered.in_tree), in_default_registry(lowered.out_tree)
    return jitted.JaxProgram(jaxpr, params, values, *trees)


def _plain(aval: Any) -> Any:
    return jax.core.ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type)


def _of_all(kept: Sequence[bool], of_kept: Any, of_unused: Any) -> tuple[Any, ...]:
    """Return values of the arguments that a module takes as values of all arguments."""
    rest = iter(of_kept)
    return tuple(next(rest) if is_kept else of_unused for is_kept in kept)


def _request(sharding: Any, aval: Any) -> Any:
    # JAX replicates scalars that no one placed.
    return named_sharding.UNSPECIFIED if not aval.shape and not _is_named(sharding) else sharding


def _is_named(sharding: Any) -> bool:
    return isinstance(sharding, jax.sharding.NamedSharding)


def _lower(
    ctx: Any,
    *args: Any,
    module: StableHLOModule,
    out_avals: tuple[Any, ...],
    meshes: tuple[Any, ...],
    fixes_axes: bool,
) -> Sequence[Any]:
    """Insert a module, with the sizes of other meshes, and call it."""
    inner = ir.Module.parse(module.bytecode)
    _check(ctx, module, inner)
    symbols = [op for op in inner.body.operations if op.operation.name == "sdy.mesh"]
    named = [op for op in symbols if sdy.MeshAttr(op.attributes["mesh"]).axes]
    # GSPMD's modules have no symbols.
    for op, mesh in zip(named, meshes, strict=False):
        axes = [sdy.MeshAxisAttr.get(str(name), size) for name, size in mesh.shape.items()]
        if sdy.MeshAttr.get(axes) != op.attributes["mesh"]:
            op.attributes["mesh"] = sdy.MeshAttr.get(axes)
            if "stablehlo.mesh" in op.attributes:
                del op.attributes["stablehlo.mesh"]
    main = modules.functions(inner)[modules.ENTRY]
    attributes = main.operation.attributes
    for name in ("arg_attrs", "res_attrs"):
        # The function around it has them.
        if name in attributes:
            del attributes[name]
    outer = ctx.module_context
    entry = mlir.merge_mlir_modules(outer.module, module.name, inner, outer.symbol_table)
    types, name = list(main.type.results), ir.FlatSymbolRefAttr.get(entry)
    with ir.Location.unknown():
        # A name of the call would precede those of the operations inside.
        return func_dialect.CallOp(types, name, list(args)).results


def _check(ctx: Any, module: StableHLOModule, inner: Any) -> None:
    """Raise if a module means nothing on the platform or for the devices of the program."""
    shardy, gspmd = stablehlo_parse.sharding_dialects(inner)
    if (shardy and not uses_shardy()) or (gspmd and uses_shardy()):
        other = "shardy" if shardy else "gspmd"
        raise CompileError(  # no-catalogue: needs the other partitioner
            "its module is annotated for another partitioner: run with "
            f"XLASHARD_PARTITIONER={other}"
        )
    count = device_count(ctx)
    if gspmd and count != module.num_partitions:
        raise CompileError(  # no-catalogue: needs the GSPMD partitioner
            f"its module has GSPMD's annotations for {module.num_partitions} devices, not {count}: "
            "pass the function and its arguments"
        )
    (platform,) = ctx.module_context.platforms
    if platform == module.platform:
        return
    targets = {
        ir.StringAttr(op.attributes["call_target_name"]).value
        for op in modules.operations(inner.operation)
        if op.name == "stablehlo.custom_call"
    }
    own = sorted(target for target in targets if not target.startswith(_PORTABLE))
    if own:
        raise CompileError(
            f"it was lowered for {module.platform}, whose {', '.join(own)} is unknown on "
            f"{platform}: write f.trace(...).lower(lowering_platforms=({platform!r},)), or pass "
            "the function and its arguments"
        )


@lru_cache(maxsize=1)
def _module_call() -> Any:
    """Return the primitive that calls a module."""
    primitive = core.Primitive("stablehlo_module")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, out_avals, **__: list(out_avals))
    mlir.register_lowering(primitive, _lower)
    return primitive
