"""The stage `Compiled` of a pjit-ed function, and the interface of all compiled programs."""

import weakref
from collections.abc import Sequence
from functools import cached_property
from itertools import compress
from typing import Any, Self

import jax

from xlashard._jax.runtime import dispatch, executables
from xlashard._jax.runtime.shardings import Device, Format, if_reported
from xlashard._jax.tree_definitions import outline
from xlashard.core.array.array_class.deletion import SHARDS, DonationTracker, release_shards
from xlashard.core.pjit.arguments import describe_arguments, may_share, split_by_donation
from xlashard.core.pjit.dispatch import DonationInfo, Results, run_repeatably
from xlashard.core.pjit.shardings.resolve import check_committed_layout
from xlashard.core.pjit.shardings.resources import check_whole
from xlashard.core.pjit.stages.bound_step import BoundStep, plan_step
from xlashard.core.pjit.stages.info import Stage, StageInfo, check_place, checked_dialect, struct
from xlashard.core.program.environment import LoadTarget
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import Mesh
from xlashard.errors import ArgumentError
from xlashard.support.tracebacks import short_tracebacks, shorten, shortened


class Executable:
    """A compiled program of one stage, called by jaxlib's dispatcher."""

    _info: StageInfo
    _compiled: CompiledProgram
    _body: Any = None
    _converts_layouts = False

    @property
    def devices(self) -> tuple[Device, ...]:
        """Return the devices it runs on, in order."""
        return self._compiled.plan.devices

    @property
    def input_shardings(self) -> Any:
        """Return the shardings of the arguments, as their tree; None for an unused argument."""
        return self._spread(self._compiled.in_shardings, None)

    @property
    def output_shardings(self) -> Any:
        """Return the shardings of the result, as its tree."""
        return self._of_results(self._compiled.out_shardings)

    @property
    def input_formats(self) -> Any:
        """Return the layouts and shardings of the arguments, as their tree of `Format`.

        Both are None for an unused argument.
        """
        program = self._compiled
        formats = _formats(program.full_layouts[0], program.in_shardings)
        return self._spread(formats, Format(None, None))

    @property
    def output_formats(self) -> Any:
        """Return the layouts and shardings of the result, as its tree of `Format`."""
        program = self._compiled
        formats = _formats(program.full_layouts[1], program.out_shardings)
        return self._of_results(formats)

    @property
    def out_info(self) -> Any:
        """Return the shapes, dtypes, layouts and shardings of the result, as its tree."""
        program, info = self._compiled, self._info
        places = _formats(program.full_layouts[1], program.out_jax_shardings)
        structs = [struct(*pair) for pair in zip(info.out_avals, places, strict=False)]
        return self._of_results(structs)

    def _of_results(self, values: Sequence[Any]) -> Any:
        """Return values of all results of the program, on the tree of the result."""
        tree = self._info.out_tree
        return outline(tree, values[: tree.num_leaves])

    def _spread(self, of_taken: Sequence[Any], of_unused: Any) -> Any:
        """Return values of the arguments that the program takes, on the tree of all."""
        values = iter(of_taken[len(self._compiled.consts) :])
        flat = [next(values) if kept else of_unused for kept in self._compiled.kept]
        return outline(self._info.in_tree, flat)

    @shortened
    def as_text(self, dialect: str = "hlo") -> str:
        """Return the program as text.

        Args:
            dialect: `"hlo"`, optimised and partitioned, or `"stablehlo"`, the annotated module
                that was compiled.

        Raises:
            ArgumentError: If the dialect is unknown, or the program was loaded from a file, which
                has no StableHLO module.
        """
        if checked_dialect(dialect) == "hlo":
            return executables.compiled_text(self.runtime_executable())
        lowered = self._compiled.lowered
        if lowered is None:
            raise ArgumentError(
                f"{self._info.name} was loaded as a compiled program, without its StableHLO "
                "module: as_text('hlo') shows what it runs"
            )
        return lowered.as_text()

    def cost_analysis(self) -> dict[str, float] | None:
        """Return XLA's estimates for the optimised program, per device: FLOP, bytes accessed.

        None where the platform has no estimates, as for GPUs of a topology.
        """
        executable = self.runtime_executable()
        return if_reported(lambda: executables.compiled_cost(executable))

    def memory_analysis(self) -> Any:
        """Return the bytes per device: arguments, results, aliases, temporaries, code."""
        return executables.compiled_memory(self.runtime_executable())

    def runtime_executable(self) -> Any:
        """Return PJRT's loaded executable."""
        return self._compiled.executable

    @shortened
    def serialize(self) -> bytes:
        """Return the program as bytes, to be loaded by `deserialize` in another process.

        They contain the closed-over values, trees, shardings and donation. Loading them needs the
        same versions of JAX and jaxlib, and devices of the same kind in the same arrangement.

        Raises:
            SavedProgramError: If the program calls Python functions, which no file can hold.
        """
        from xlashard.core.pjit.stages.serialization import (
            save,  # takes long to import, and few need it
        )

        return save(type(self).__name__, self._info, self._compiled)

    def __reduce__(self) -> Any:
        kind = type(self).__name__
        raise ArgumentError(
            f"a {kind} can't be pickled: write data = compiled.serialize(), and "
            f"{kind}.deserialize(data) in the process that runs it"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program.

        Raises:
            ArgumentError: If the arguments have another structure, shape or dtype.
            DeletedError: If an argument's buffers are deleted.
            DonationError: If a donated argument shares its buffers with another one.
            ResourceError: If a committed argument has another sharding or layout.
        """
        try:
            if self._donates and may_share(*self._donated_leaves(args, kwargs)):
                return self._miss(*args, **kwargs)[0]
            return self._dispatcher(*args, **kwargs)
        except Exception as error:
            shorten(error)
            raise
        finally:
            if SHARDS and self._donates:
                release_shards(self._donated_leaves(args, kwargs)[0], self._info.name)

    @cached_property
    def _donates(self) -> bool:
        return any(self._info.donated)

    def _donated_leaves(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], list[Any]]:
        """Return the leaves of donated arguments, and all other arrays that a call passes."""
        values = jax.tree_util.tree_leaves((args, kwargs))
        if len(values) != len(self._info.donated):
            return [], []  # of another structure, which the call refuses
        donated, others = split_by_donation(values, self._info.donated)
        return donated, [*others, *self._compiled.consts]

    @cached_property
    def _dispatcher(self) -> Any:
        # A cycle would keep the closed-over arrays of the program until a garbage collection.
        weak: Any = weakref.WeakMethod(self._miss)

        def miss(*args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
            return weak()(*args, **kwargs)

        return dispatch.new_dispatcher(self._info.name, None, miss)

    @cached_property
    def _donation(self) -> DonationInfo:
        info = self._info
        return DonationInfo(info.donated, info.paths, info.name, DonationTracker(info.name))

    def _miss(self, *args: Any, **kwargs: Any) -> tuple[Any, Any, bool]:
        values, repeatable = self._check_arguments(args, kwargs)
        results = Results(self._info.out_tree, self._info.kind_of)
        out, path = run_repeatably(self._compiled, values, results, self._donation, self._body)
        return out, path if repeatable else None, False

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], bool]:
        """Return the checked flat arguments, and True if the dispatcher may repeat the call."""
        raise NotImplementedError  # no-catalogue: abstract: both subclasses override it

    def _check_places(self, values: Sequence[Any]) -> None:
        """Refuse arguments committed to other shardings or layouts than the program's."""
        info, compiled = self._info, self._compiled
        checks = jax.config.jax_enable_checks and compiled.is_spread
        if info.moves_arguments and not checks:
            return
        arguments = describe_arguments(values, info.paths, info.in_avals)
        first = len(compiled.consts)
        shardings = compiled.in_shardings[first:]
        requested = compiled.requested_in_shardings[first:]
        text = f"{info.name} was compiled for {{}}"
        for argument, sharding in zip(compress(arguments, compiled.kept), shardings, strict=True):
            check_place(argument, sharding, text)
        if not self._converts_layouts:
            kept = compress(zip(arguments, values, strict=True), compiled.kept)
            for pair, layout in zip(kept, compiled.full_layouts[0][first:], strict=True):
                check_committed_layout(*pair, layout, text)
        check_whole(compress(values, compiled.kept), compress(info.paths, compiled.kept), requested)


def _formats(layouts: Sequence[Any], shardings: Sequence[Any]) -> list[Format]:
    return [Format(*pair) for pair in zip(layouts, shardings, strict=True)]


class Compiled(Executable, Stage, jax.stages.Compiled):
    """A compiled program for arguments of one structure, shape and sharding.

    It is a `jax.stages.Compiled`.

    Example:
        >>> import numpy as np
        >>> from xlashard import pjit
        >>> compiled = pjit(lambda x: x * 2).lower(np.ones(2, np.float32)).compile()
        >>> compiled(np.ones(2, np.float32))
        Array([2., 2.], dtype=float32)
    """

    def __init__(self, info: StageInfo, compiled: CompiledProgram, body: Any = None) -> None:
        self._info = info
        self._compiled = compiled
        self._body = body

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Run the program, like `__call__`."""
        return self(*args, **kwargs)

    @classmethod
    def deserialize(
        cls,
        data: bytes,
        *,
        devices: Sequence[Device] | Mesh | None = None,
        in_tree: Any = None,
        out_tree: Any = None,
        allow_other_flags: bool = False,
    ) -> Self:
        """Return the program of the bytes that `serialize` gave.

        Load trusted data only: it contains machine code. Nothing else in it is run or imported.

        Args:
            data: The bytes.
            devices: The devices to run on, in the program's order or as a mesh; without them those
                at the same coordinates of the TPU's torus, or with the same ids.
            in_tree: The tree of `((args, ...), {name: arg, ...})`, needed if one of its nodes has a
                static part that no file can hold.
            out_tree: The tree of the result, likewise.
            allow_other_flags: Accept a program that was compiled with other compiler flags
                (`XLA_FLAGS`, `LIBTPU_INIT_ARGS`) than this process has.

        Raises:
            ArgumentError: If an argument has the wrong type.
            SavedProgramError: If the bytes are damaged or no saved program, were made by another
                version, with other flags or for other devices, or lack a tree.

        Example:
            >>> import numpy as np
            >>> from xlashard import pjit
            >>> x = np.arange(3, dtype=np.float32)
            >>> data = pjit(lambda x: {"twice": x * 2}).lower(x).compile().serialize()
            >>> Compiled.deserialize(data)(x)
            {'twice': Array([0., 2., 4.], dtype=float32)}
        """
        from xlashard.core.pjit.stages.serialization import (
            load,  # takes long to import, and few need it
        )

        with short_tracebacks:
            target = LoadTarget(devices, allow_other_flags)
            return cls(*load(cls.__name__, data, target, (in_tree, out_tree)))

    def _check_arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], bool]:
        values = self._info.checked(args, kwargs, "compiled")
        self._check_places(values)
        return values, True

    @shortened
    def bind(self, state: Any, *, argnum: int = 0) -> BoundStep:
        """Bind a state for a loop `state, out = step(state, ...)`, whose buffers are kept.

        Args:
            state: The first state, an argument of this program.
            argnum: Its position.

        Returns:
            A callable of the other arguments; its `state` gives the state as a pytree of Arrays.

        Raises:
            ArgumentError: If the program's result does not begin with a new state.
        """
        plan = plan_step(self._compiled, self._info, argnum)
        return BoundStep(self._compiled, plan, state, self._body)
