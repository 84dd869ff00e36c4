"""A training step that keeps its state's buffers between calls."""

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from xlashard._jax import dispatch
from xlashard._jax.lowering import dtype_name
from xlashard._jax.tracing import abstractify
from xlashard.array import Array, wrap, wrap_tree
from xlashard.array.handles import is_handle
from xlashard.errors import ArgumentError, DeletedError
from xlashard.pjit.function import Call
from xlashard.pjit.prepare import Prepared


@dataclass(frozen=True, eq=False)
class Input:
    """A leaf of the arguments other than the state.

    Attributes:
        path: As a person would write it.
        aval: Its abstract value.
        twin: JAX's sharding that the program takes it under; None if the program drops it.
        layout: Its layout where that is not the default one.
    """

    path: str
    aval: Any
    twin: Any
    layout: Any


@dataclass(frozen=True, eq=False)
class StepPlan:
    """How a bound step's program takes and gives buffers, worked out once.

    Attributes:
        name: The function's name.
        state_tree: The tree of the state.
        rest_tree: The tree of the other arguments.
        out_tree: The tree of what a call returns besides the state; None if it returns only that.
        inputs: The leaves of the other arguments.
        order: Where each argument of the program stands among placed constants, state and other
            arguments; None if they stand in that order already.
        donates: Whether a call takes over the state's buffers.
    """

    name: str
    state_tree: Any
    rest_tree: Any
    out_tree: Any
    inputs: tuple[Input, ...]
    order: tuple[int, ...] | None
    donates: bool


class BoundStep:
    """Calls `step(*rest)` of a program `state, out = f(state, *rest)` and keeps the state itself.

    Structure, shapes and places of the state are checked once, when it is bound. A call then only
    places the other arguments and hands the program its buffers. Made by `Compiled.bind`.

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

    def __init__(self, prepared: Prepared, plan: StepPlan, state: Sequence[Any]) -> None:
        self._run = prepared.program.run
        self._consts = prepared.consts
        self._plan = plan
        self._given: list[Any] = list(state) if plan.donates else []
        self._state: list[Any] | None = _placed_state(prepared, plan, state)
        self._lock = threading.Lock()

    @property
    def state(self) -> Any:
        """The state after the last call, as its pytree of Arrays.

        If the program takes over the state's buffers, the next call deletes these Arrays, as
        passing them to the pjit-ed function would.
        """
        with self._lock:
            arrays = [wrap(handle) for handle in self._alive()]
            if self._plan.donates:
                self._given.extend(arrays)
        return self._plan.state_tree.unflatten(arrays)

    def _alive(self) -> list[Any]:
        if self._state is None:
            raise DeletedError(
                f"the state of {self._plan.name} was donated to a call that failed, so its buffers "
                "are deleted: bind a new state, for example from a checkpoint"
            )
        return self._state

    def __call__(self, *rest: Any) -> Any:
        """Runs one step.

        Args:
            rest: The arguments other than the state, in order.

        Returns:
            What the function returns besides the new state; None if nothing.

        Raises:
            ArgumentError: If the arguments have another structure, shape or dtype.
            DeletedError: If a call before this one failed after it took the state's buffers.
        """
        plan = self._plan
        # An empty call of a step without inputs needs no look at its structure.
        inputs = self._inputs(rest) if rest or plan.inputs else ()
        with self._lock:
            state = self._state if self._state is not None else self._alive()
            handles = [*self._consts, *state, *inputs]
            if plan.order is not None:
                handles = [handles[i] for i in plan.order]
            if plan.donates:
                # A call that fails half way has taken the buffers all the same.
                self._state = None
            out = self._run(handles)
            if self._given:
                self._note_donated()
            if plan.out_tree is None:
                self._state = out
                return None
            self._state = out[: len(state)]
        return wrap_tree(plan.out_tree, out[len(state) :])

    def _inputs(self, rest: tuple[Any, ...]) -> list[Any]:
        """The handles of a call's inputs, those that the program drops left out."""
        plan = self._plan
        leaves, tree = jax.tree_util.tree_flatten(rest)
        if tree != plan.rest_tree:
            raise ArgumentError(
                f"{plan.name} was bound for arguments of the structure {plan.rest_tree}, but was "
                f"called with {tree}"
            )
        return [
            _placed(x, i) for x, i in zip(leaves, plan.inputs, strict=True) if i.twin is not None
        ]

    def _note_donated(self) -> None:
        for array in self._given:
            if isinstance(array, Array):
                array._deleted_by = f"the bound step {self._plan.name}"
        self._given.clear()


def _placed(value: Any, wanted: Input) -> Any:
    """The handle of an input; one that is right already is taken as it is."""
    handle = value._handle if type(value) is Array else value
    aval = wanted.aval
    if (
        is_handle(handle)
        and handle.shape == aval.shape
        and handle.dtype == aval.dtype
        and handle.sharding == wanted.twin
        and wanted.layout is None
    ):
        return handle
    given = abstractify(handle)
    if (given.shape, given.dtype) != (aval.shape, aval.dtype):
        raise ArgumentError(
            f"the step was bound for {wanted.path} as {dtype_name(aval)}, but was called with "
            f"{dtype_name(given)}"
        )
    return dispatch.place([handle], [wanted.twin], [wanted.layout])[0]


def _placed_state(prepared: Prepared, plan: StepPlan, state: Sequence[Any]) -> list[Any]:
    """The handles of the first state, under the shardings of every later one."""
    program = prepared.program
    count = len(state)
    twins = program.out_twins[:count]
    return list(dispatch.place(state, twins, [None] * count))


def bind_step(prepared: Prepared, call: Call, state: Any, argnum: int) -> BoundStep:
    """Checks that a program maps a state to a state, and binds the first one.

    Raises:
        ArgumentError: If its result does not begin with a state like the argument, or the state
            given is not what the program was compiled for.
    """
    traced = call.traced
    args_tree, kwargs_tree = traced.in_tree.children()
    parts = args_tree.children()
    name = traced.name
    if kwargs_tree.num_leaves or not 0 <= argnum < len(parts):
        raise ArgumentError(
            f"{name} can't be bound at argument {argnum}: it was compiled for {len(parts)} "
            f"positional and {kwargs_tree.num_leaves} keyword arguments; compile it with the state "
            "as a positional argument"
        )
    state_tree = parts[argnum]
    start = sum(p.num_leaves for p in parts[:argnum])
    stop = start + state_tree.num_leaves
    leaves, given_tree = jax.tree_util.tree_flatten(state)
    if given_tree != state_tree:
        raise ArgumentError(
            f"{name} was compiled for a state of the structure {state_tree}, but {given_tree} was "
            "given to bind"
        )
    _check_state(leaves, traced.arg_names[start:stop], traced.in_avals[start:stop])
    out_tree = _tree_besides_state(traced.out_tree, state_tree, name)
    _check_same_place(prepared, call, range(start, stop))
    rest_tree = jax.tree_util.treedef_tuple([p for i, p in enumerate(parts) if i != argnum])
    plan = StepPlan(
        name=name,
        state_tree=state_tree,
        rest_tree=rest_tree,
        out_tree=out_tree,
        inputs=_inputs(prepared, call, range(start, stop)),
        order=_order(prepared, range(start, stop)),
        donates=any(call.donated[start:stop]),
    )
    return BoundStep(prepared, plan, leaves)


def _check_state(leaves: Sequence[Any], paths: Sequence[str], avals: Sequence[Any]) -> None:
    for leaf, path, aval in zip(leaves, paths, avals, strict=True):
        given = abstractify(leaf)
        if (given.shape, given.dtype) != (aval.shape, aval.dtype):
            raise ArgumentError(
                f"the step was compiled for {path} as {dtype_name(aval)}, but {dtype_name(given)} "
                "was given to bind"
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise DeletedError(f"{path} was given to bind, but its buffers are deleted")


def _tree_besides_state(out_tree: Any, state_tree: Any, name: str) -> Any:
    """The tree of what a call returns besides the state; None for nothing."""
    if out_tree == state_tree:
        return None
    data = out_tree.node_data()
    parts = out_tree.children()
    if data is None or data[0] is not tuple or not parts or parts[0] != state_tree:
        raise ArgumentError(
            f"{name} can't be bound: its result must be the new state, or a tuple that begins with "
            f"it; the state is {state_tree}, the result {out_tree}"
        )
    rest = parts[1:]
    return rest[0] if len(rest) == 1 else jax.tree_util.treedef_tuple(rest)


def _program_positions(prepared: Prepared) -> dict[int, int]:
    """For each argument that the program takes, its place among the program's arguments."""
    positions, at = {}, len(prepared.consts)
    for i, kept in enumerate(prepared.kept):
        if kept:
            positions[i] = at
            at += 1
    return positions


def _check_same_place(prepared: Prepared, call: Call, state: range) -> None:
    parts, positions = prepared.program.parts, _program_positions(prepared)
    out_avals = call.traced.jaxpr.out_avals
    for k, i in enumerate(state):
        path, aval, new = call.traced.arg_names[i], call.traced.in_avals[i], out_avals[k]
        if (aval.shape, aval.dtype) != (new.shape, new.dtype):
            raise ArgumentError(
                f"{call.traced.name} can't be bound: {path} goes in as {dtype_name(aval)} and "
                f"comes out as {dtype_name(new)}"
            )
        if i not in positions:
            continue
        before, after = parts.in_shardings[positions[i]], parts.out_shardings[k]
        if not before.is_equivalent_to(after, aval.ndim):
            raise ArgumentError(
                f"{call.traced.name} can't be bound: {path} goes in as {before} and comes out as "
                f"{after}; give out_shardings for the state that equal its in_shardings"
            )


def _inputs(prepared: Prepared, call: Call, state: range) -> tuple[Input, ...]:
    program, positions = prepared.program, _program_positions(prepared)
    found = []
    for i, (path, aval) in enumerate(zip(call.traced.arg_names, call.traced.in_avals, strict=True)):
        if i in state:
            continue
        at = positions.get(i)
        twin = None if at is None else program.in_twins[at]
        found.append(Input(path, aval, twin, None if at is None else program.in_layouts[at]))
    return tuple(found)


def _order(prepared: Prepared, state: range) -> tuple[int, ...] | None:
    """Where each program argument stands in `[*consts, *state, *other arguments in use]`."""
    consts = len(prepared.consts)
    order = list(range(consts))
    rest_at = consts + len(state)
    for i, kept in enumerate(prepared.kept):
        if i in state:
            if kept:
                order.append(consts + i - state.start)
        elif kept:
            order.append(rest_at)
            rest_at += 1
    return None if order == list(range(rest_at)) else tuple(order)
