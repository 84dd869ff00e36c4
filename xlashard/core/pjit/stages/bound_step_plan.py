"""Plan of a bound step: the buffers that its program takes and returns, checked once."""

from collections.abc import Sequence
from itertools import compress, count
from typing import Any

import jax

from xlashard._jax.lowering import aval_text
from xlashard._jax.runtime.transfer import base_handle, shared_pair
from xlashard._jax.trace.tracing import is_extended
from xlashard._jax.tree_definitions import find_tree_difference
from xlashard.core.pjit.arguments import (
    arguments_may_move,
    bare,
    check_concrete,
    check_unshared,
    check_values,
    describe_arguments,
)
from xlashard.core.pjit.shardings.resources import check_whole, is_split
from xlashard.core.pjit.stages.info import StageInfo, check_place, check_type
from xlashard.core.program.execute import CompiledProgram
from xlashard.core.sharding import XLACompatibleSharding
from xlashard.core.sharding.sharding_texts import described
from xlashard.errors import ArgumentError
from xlashard.support.lazily import dataclass


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
