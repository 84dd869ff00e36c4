"""A training step that keeps its state's buffers between calls, and its plan, checked once."""

import threading
from collections.abc import Sequence
from functools import partial
from itertools import compress, count
from typing import Any

import jax
import numpy as np

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.execute import Runner
from xlashard._jax.runtime.transfer import HandleType, base_handle, lacks_buffer, shared_pair
from xlashard._jax.trace.tracing import Tracer, is_extended
from xlashard._jax.tree_definitions import find_tree_difference
from xlashard.core.array import Array, wrap_tree
from xlashard.core.array.array_class.deletion import SHARDS, release_shards
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.array.cross_process_check import process_copies
from xlashard.core.pjit.arguments import (
    arguments_may_move,
    bare,
    check_alive,
    check_concrete,
    check_unshared,
    check_values,
    describe_arguments,
    may_share,
    split_by_donation,
)
from xlashard.core.pjit.dispatch import explained_nan
from xlashard.core.pjit.lower import check_closed_alive
from xlashard.core.pjit.shardings.resources import check_whole, is_split
from xlashard.core.pjit.stages.info import StageInfo, check_place, check_type
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import XLACompatibleSharding
from xlashard.core.sharding.sharding_texts import described
from xlashard.errors import ArgumentError, DeletedError, NonFiniteError
from xlashard.support.lazily import dataclass
from xlashard.support.tracebacks import shorten


@dataclass(frozen=True, eq=False)
class Input:
    """A leaf of the arguments other than the state.

    Attributes:
        path: Its path.
        aval: Its abstract value.
        position: Its position among the program's arguments; None if the program drops it.
        jax_sharding: JAX's sharding under which the program takes it.
        layout: The layout in which the program takes it, comparable with that of a handle.
        split: The sharding that was requested for it, if processes hold different pieces by it.
    """

    path: str
    aval: Any
    position: int | None
    jax_sharding: Any = None
    layout: Any = None
    split: XLACompatibleSharding | None = None


@dataclass(frozen=True, eq=False)
class StepPlan:
    """The buffers that a bound step's program takes and returns.

    Attributes:
        name: The function's name.
        paths: The paths of all leaves of its arguments.
        program_paths: The paths of the arguments that the program takes.
        state_tree: The tree of the state.
        state_paths: The paths of its leaves.
        keys: True if keys, whose handles differ, are among the state's leaves or the results.
        rest_tree: The tree of the other arguments.
        out_tree: The tree of the results besides the state; None if the state is the only one.
        inputs: The leaves of the other arguments.
        takes_leaves: True if each of the other arguments is a single leaf.
        order: The position of each argument of the program among placed constants, state and other
            arguments; None if they are in that order already.
        donates: True if a call donates the state's buffers.
        donated_inputs: For each leaf of the other arguments, True if a call donates its buffers;
            empty if it donates none.
        before: The number of leaves of the other arguments before the state.
    """

    name: str
    paths: tuple[str, ...]
    program_paths: tuple[str, ...]
    state_tree: Any
    state_paths: tuple[str, ...]
    keys: bool
    rest_tree: Any
    out_tree: Any
    inputs: tuple[Input, ...]
    takes_leaves: bool
    order: tuple[int, ...] | None
    donates: bool
    donated_inputs: tuple[bool, ...]
    before: int


def plan_step(compiled: CompiledProgram, info: StageInfo, argnum: int) -> StepPlan:
    """Check that a program maps a state to a state.

    Raises:
        ArgumentError: If its result does not begin with a state like the argument.
    """
    args_tree, kwargs_tree = info.in_tree.children()
    parts = args_tree.children()
    name = info.name
    if kwargs_tree.num_leaves or not 0 <= argnum < len(parts):
        raise ArgumentError(
            f"{name} can't be bound at argument {argnum}: it was compiled for {len(parts)} "
            f"positional and {kwargs_tree.num_leaves} keyword arguments; compile it with the state "
            "as a positional argument"
        )
    if compiled.stateful:
        raise ArgumentError(
            f"{name} can't be bound: it has references (jax.new_ref) or tokens, which keep their "
            "state themselves; call the compiled function, or pass arrays and return the new ones"
        )
    state_tree = parts[argnum]
    start = sum(p.num_leaves for p in parts[:argnum])
    state = range(start, start + state_tree.num_leaves)
    out_tree = _tree_besides_state(info.out_tree, state_tree, name)
    _check_same_place(compiled, info, state)
    rest_tree = jax.tree_util.treedef_tuple([p for i, p in enumerate(parts) if i != argnum])
    inputs_donated = tuple(donated for i, donated in enumerate(info.donated) if i not in state)
    return StepPlan(
        name=name,
        paths=info.paths,
        program_paths=tuple(compiled.argument_paths(info.paths, name)),
        state_tree=state_tree,
        state_paths=tuple(info.paths[i] for i in state),
        keys=any(map(is_extended, info.out_avals)),
        rest_tree=rest_tree,
        out_tree=out_tree,
        inputs=_inputs(compiled, info, state),
        takes_leaves=all(map(jax.tree_util.treedef_is_leaf, rest_tree.children())),
        order=_order(compiled, state),
        donates=any(info.donated[i] for i in state),
        donated_inputs=inputs_donated if any(inputs_donated) else (),
        before=start,
    )


def place_state(
    compiled: CompiledProgram, plan: StepPlan, state: Any
) -> tuple[list[Any], list[Any]]:
    """Check a first state, and place it like every later one.

    Returns:
        The state's leaves, and their handles.

    Raises:
        ArgumentError: If the program was compiled for another state.
        DeletedError: If its buffers are deleted.
        ResourceError: If it is committed to another sharding.
        DonationError: If two of its donated leaves share their buffers.
    """
    leaves, tree = jax.tree_util.tree_flatten(state)
    if tree != plan.state_tree:
        path, before, after = find_tree_difference("state", plan.state_tree, tree)
        raise ArgumentError(
            f"{plan.name} was compiled for {path} with {before}, but bind got {after}: give a "
            "state like that, or lower and compile for this one"
        )
    number, paths = len(leaves), plan.state_paths
    avals, shardings = compiled.out_avals[:number], compiled.out_shardings[:number]
    check_values(leaves, paths, static=False)
    check_concrete(leaves, paths)
    for leaf, path, aval in zip(leaves, paths, avals, strict=True):
        text = f"{plan.name} was compiled for {{}}, but {{}} was bound"
        check_type(leaf, path, aval, text, "lower and compile it for such a state")
    for argument, sharding in zip(describe_arguments(leaves, paths, avals), shardings, strict=True):
        check_place(argument, sharding, f"{plan.name} keeps {{}}")
    plans = compiled.plan.results[:number]
    requested = [None if p.is_free else s for p, s in zip(plans, shardings, strict=True)]
    check_whole(leaves, paths, requested)
    with arguments_may_move(leaves, paths, compiled.out_jax_shardings[:number]):
        handles = compiled.place_as_results([bare(leaf) for leaf in leaves])
    if plan.donates:
        pair = shared_pair(list(map(base_handle, handles)), range(number))
        check_unshared(pair, paths, [True] * number, plan.name)
    return leaves, handles


def _tree_besides_state(out_tree: Any, state_tree: Any, name: str) -> Any:
    """Return the tree of the results besides the state; None if there are no others."""
    if out_tree == state_tree:
        return None
    data = out_tree.node_data()
    parts = out_tree.children()
    if data is None or data[0] is not tuple or not parts or parts[0] != state_tree:
        raise ArgumentError(
            f"{name} can't be bound: its result must be the new state, or a tuple that begins with "
            f"it; the state is {state_tree}, the result {out_tree}: write `return state, out`"
        )
    rest = parts[1:]
    return rest[0] if len(rest) == 1 else jax.tree_util.treedef_tuple(rest)


def _program_positions(compiled: CompiledProgram) -> dict[int, int]:
    """Return the position of each argument of a call among those that the program takes."""
    kept = compress(count(), compiled.kept)
    return {i: at for at, i in enumerate(kept, len(compiled.consts))}


def _check_same_place(compiled: CompiledProgram, info: StageInfo, state: range) -> None:
    positions = _program_positions(compiled)
    name = info.name
    for k, i in enumerate(state):
        path, aval, new = info.paths[i], info.in_avals[i], info.out_avals[k]
        if (aval.shape, aval.dtype) != (new.shape, new.dtype):
            how = f"in its shape {tuple(aval.shape)}"
            if aval.shape == new.shape:
                how = f"by .astype({aval.dtype.name!r})"
            raise ArgumentError(
                f"{name} can't be bound: {path} goes in as {aval_text(aval)} and comes out as "
                f"{aval_text(new)}: return it {how}"
            )
        if i not in positions:
            continue
        at = positions[i]
        before, after = compiled.in_shardings[at], compiled.out_shardings[k]
        if not before.is_equivalent_to(after, aval.ndim):
            raise ArgumentError(
                f"{name} can't be bound: {path} goes in as {described(before)} and comes out as "
                f"{described(after)}; give out_shardings for the state that equal its in_shardings"
            )
        if compiled.in_layouts[at] != compiled.out_layouts[k]:
            raise ArgumentError(
                f"{name} can't be bound: {path} goes in laid out as {compiled.in_layouts[at]} and "
                f"comes out as {compiled.out_layouts[k]} (None is the default); give a Format in "
                "out_shardings that equals that in in_shardings"
            )


def _inputs(compiled: CompiledProgram, info: StageInfo, state: range) -> tuple[Input, ...]:
    positions = _program_positions(compiled)
    inputs, requested = [], compiled.requested_in_shardings
    for i, (path, aval) in enumerate(zip(info.paths, info.in_avals, strict=True)):
        at, places = positions.get(i), ()
        if at is not None:
            sharding = requested[at]
            split = None if sharding is None or not is_split(sharding) else sharding
            places = compiled.in_jax_shardings[at], compiled.raw_in_layouts[at], split
        if i not in state:
            inputs.append(Input(path, aval, at, *places))
    return tuple(inputs)


def _order(compiled: CompiledProgram, state: Sequence[int]) -> tuple[int, ...] | None:
    """Return the position of each program argument in `[*consts, *state, *used arguments]`."""
    consts = len(compiled.consts)
    rest = count(consts + len(state))
    order = list(range(consts))
    for i in compress(count(), compiled.kept):
        order.append(consts + i - state[0] if i in state else next(rest))
    return None if order == list(range(next(rest))) else tuple(order)


# What jax.tree_util.tree_flatten calls.
_flatten = jax.tree_util.default_registry.flatten


class BoundStep:
    """Calls `step(*rest)` of a program `state, out = f(state, *rest)` and keeps the state itself.

    Structure, shapes and shardings of the state are checked once, when it is bound. A call then
    only places the other arguments and passes the program its buffers. Made by `Compiled.bind`.

    Example:
        >>> import jax.numpy as jnp
        >>> from xlashard import pjit
        >>> def count(total, x):
        ...     return total + x.sum(), x.max()
        >>> zero = jnp.zeros(())
        >>> step = pjit(count, donate_argnums=0).lower(zero, jnp.ones(3)).compile().bind(zero)
        >>> for _ in range(3):
        ...     largest = step(jnp.ones(3))
        >>> print(step.state, largest)
        9.0 1.0
    """

    def __init__(
        self, compiled: CompiledProgram, plan: StepPlan, state: Any, body: Any = None
    ) -> None:
        leaves, handles = place_state(compiled, plan, state)
        self._program = compiled
        self._consts = compiled.consts
        self._body = body
        self._plan = plan
        self._given: list[Any] = leaves if plan.donates else []
        self._state: list[Any] | None = handles
        # True as long as other arrays may share the buffers of the state.
        self._is_shared = True
        # The raw results of a run until the new state is taken from them: an interrupt finds the
        # state either in `_state`, still whole, or in here.
        self._results: list[list[Any]] = []
        of_several = compiled.fingerprint is not None
        self._run: Runner = self._first_run if of_several else compiled.runner(self._results)
        effects = compiled.body.ordered_effects
        self._is_bare = not (effects or plan.keys)
        self._is_in_order = not plan.keys and plan.order is None
        # XLA refuses a shared buffer before anything starts where there is one device.
        self._is_spread = compiled.is_spread
        self._lock = threading.Lock()
        # Arguments of the first run by path, whose copies are compared between the processes.
        self._first_values: list[tuple[str, Any]] = []
        if of_several:
            self._first_values = list(zip(plan.state_paths, leaves, strict=True))
            self._inputs = self._first_inputs

    @property
    def state(self) -> Any:
        """Return the state after the last call, as its pytree of Arrays.

        If the program takes over the state's buffers, the next call deletes these Arrays, as
        passing them to the pjit-ed function would.
        """
        with self._lock:
            self._take_results()
            arrays = [wrap_result(handle) for handle in self._alive()]
            self._is_shared = True
            if self._plan.donates:
                self._given.extend(arrays)
        return self._plan.state_tree.unflatten(arrays)

    def _alive(self) -> list[Any]:
        if self._state is None:
            raise DeletedError(  # no-catalogue: the runtime decides when a call fails
                f"the state of {self._plan.name} was donated to a call that failed, so its buffers "
                "are deleted: bind a new state, for example from a checkpoint"
            )
        return self._state

    def __call__(self, *rest: Any) -> Any:
        """Run one step.

        Args:
            rest: The arguments other than the state, in order.

        Returns:
            What the function returns besides the new state; None if nothing.

        Raises:
            ArgumentError: If the arguments have another structure, shape or dtype.
            DeletedError: If a call before this one failed after it took the state's buffers.
        """
        plan = self._plan
        try:
            # An empty call of a step without inputs needs no look at its structure.
            inputs = self._inputs(rest) if rest or plan.inputs else ()
            with self._lock:
                results = self._results
                if results:
                    self._take_results()
                state = self._state if self._state is not None else self._alive()
                handles = state
                consts = self._consts
                if consts:
                    check_closed_alive(consts, plan.name)
                    handles = [*consts, *state, *inputs]
                elif inputs:
                    handles = [*state, *inputs]
                if not self._is_in_order:
                    handles = self._ordered(handles)
                if self._is_spread and (self._is_shared or plan.donated_inputs):
                    self._check_unshared(handles, rest)
                try:
                    self._run(handles)
                except NonFiniteError as error:
                    raise self._explained(error, state, rest) from None
                except Exception:
                    if any(handle.is_deleted() for handle in state):
                        self._state = None
                    elif self._given or plan.donated_inputs:
                        self._check_unshared(handles, rest)
                    raise
                # As `_take_results` does it, written out.
                out = results[0] if self._is_bare else self._program.results(results[0])
                self._state = out if plan.out_tree is None else out[: len(state)]
                results.clear()
                self._is_shared = False
                if self._given or SHARDS:
                    self._note_donated(rest)
            if plan.out_tree is None:
                return None
            if plan.keys:
                return plan.out_tree.unflatten(map(wrap_result, out[len(state) :]))
            return wrap_tree(plan.out_tree, out[len(state) :])
        except Exception as error:
            shorten(error)
            raise

    def _ordered(self, handles: list[Any]) -> list[Any]:
        """Return handles, those of keys unwrapped, in the order in which the program takes them."""
        if self._plan.keys:
            handles = dispatch.handles_of_keys(handles)
        order = self._plan.order
        return handles if order is None else list(map(handles.__getitem__, order))

    def _take_results(self) -> None:
        """Take the new state from the results of a run that was interrupted, if there are any.

        It may be interrupted anywhere, and is then done again.
        """
        if self._results:
            out = self._program.results(self._results[0])
            self._state = out[: self._plan.state_tree.num_leaves]
            self._results.clear()

    def _first_run(self, handles: Sequence[Any]) -> None:
        """Run for the first time, once the program's other processes have come to that."""
        paths, values = ([pair[side] for pair in self._first_values] for side in (0, 1))
        self._program.admit(copies=partial(process_copies, values, paths))
        self._first_values = []
        # An interrupt may come before the next line, which then happens again.
        self.__dict__.pop("_inputs", None)
        self._run = self._program.runner(self._results)
        self._run(handles)

    def _first_inputs(self, rest: tuple[Any, ...]) -> list[Any]:
        plan = self._plan
        placed = type(self)._inputs(self, rest)
        leaves = zip(plan.inputs, jax.tree_util.tree_leaves(rest), strict=True)
        inputs = [(i.path, leaf) for i, leaf in leaves if i.position is not None]
        self._first_values = [*self._first_values[: len(plan.state_paths)], *inputs]
        return placed

    def _inputs(self, rest: tuple[Any, ...]) -> list[Any]:
        """Return the handles of a call's inputs, without those that the program drops."""
        plan = self._plan
        if plan.takes_leaves and len(rest) == len(plan.inputs):
            # Arrays that fit are leaves, so the structure need not be compared.
            placed = []
            for value, expected in zip(rest, plan.inputs, strict=False):
                handle = _fitting(value, expected)
                if handle is None:
                    break
                placed.append(handle)
            else:
                return placed
        leaves, tree = _flatten(rest)
        if tree != plan.rest_tree:
            path, before, after = find_tree_difference("arguments", plan.rest_tree, tree)
            raise ArgumentError(
                f"{plan.name} was bound for {path} with {before}, but was called with {after}: "
                "give all arguments by position, without the state"
            )
        return [
            self._placed(x, i)
            for x, i in zip(leaves, plan.inputs, strict=True)
            if i.position is not None
        ]

    def _placed(self, value: Any, expected: Input) -> Any:
        """Return the handle of an input, moved to where the program takes it."""
        handle = _fitting(value, expected)
        if handle is not None:
            return handle
        aval, path, name = expected.aval, expected.path, self._plan.name
        if isinstance(value, Tracer):
            raise ArgumentError(
                f"{path} is a tracer: a bound step can't be part of a program; call the pjit-ed "
                f"function {name} itself there"
            )
        check_values([value], [path], static=False)
        check_concrete([value], [path])
        text = f"{name} was bound for {{}}, but was called with {{}}"
        check_type(value, path, aval, text, "lower, compile and bind it for such arguments")
        check_alive(value, path, aval)
        if expected.split is not None and isinstance(value, np.ndarray):
            check_whole([value], [path], [expected.split])
        position, handle = expected.position or 0, bare(value)
        with arguments_may_move([value], [path], [expected.jax_sharding]):
            return self._program.place([handle], position)[0]

    def _check_unshared(self, handles: Sequence[Any], rest: tuple[Any, ...]) -> None:
        """Refuse a call in which a donated array is given twice, or the state lacks a shard.

        No other array shares the state of an earlier call, unless it was read since.

        Raises:
            DonationError: With the paths of both.
            DeletedError: If a shard of the state or of an input was deleted.
        """
        plan = self._plan
        if self._is_shared:
            for handle, path in zip(self._alive(), plan.state_paths, strict=True):
                check_alive(handle, path, handle.aval)
        if not self._given:
            leaves = jax.tree_util.tree_leaves(rest)
            donated, others = split_by_donation(leaves, plan.donated_inputs)
            state = self._alive() if self._is_shared else ()
            if not may_share(donated, [*others, *self._consts, *state]):
                return
        pair, program_plan = self._program.shared_pair(handles), self._program.plan
        check_unshared(pair, plan.program_paths, program_plan.donated, plan.name)

    def _explained(
        self, error: NonFiniteError, state: Sequence[Any], rest: tuple[Any, ...]
    ) -> NonFiniteError:
        plan, leaves = self._plan, jax.tree_util.tree_leaves(rest)
        values = (*leaves[: plan.before], *state, *leaves[plan.before :])
        return explained_nan(error, plan.name, self._body, values, plan.paths)

    def _note_donated(self, rest: tuple[Any, ...]) -> None:
        consumer = f"the bound step {self._plan.name}"
        leaves = jax.tree_util.tree_leaves(rest)
        release_shards([*self._given, *compress(leaves, self._plan.donated_inputs)], consumer)
        for array in self._given:
            if isinstance(array, Array):
                array._deleted_by = consumer
        self._given.clear()


def _fitting(value: Any, expected: Input) -> Any:
    """Return the handle of an input that the program takes as it is; None for any other."""
    handle, aval = value._buffers if type(value) is Array else value, expected.aval
    if (
        type(handle) is HandleType
        and expected.position is not None
        and (handle.aval == aval or (handle.shape, handle.dtype) == (aval.shape, aval.dtype))
        # An Array that lacks a shard is deleted.
        and not (lacks_buffer(handle) if handle is value else handle.is_deleted())
        and handle.sharding == expected.jax_sharding
        and handle._pjrt_layout == expected.layout
    ):
        return handle
    return None
