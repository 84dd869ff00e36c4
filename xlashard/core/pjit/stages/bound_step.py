"""A training step that keeps its state's buffers between calls."""

import threading
from collections.abc import Sequence
from functools import partial
from itertools import compress
from typing import Any

import jax
import numpy as np

from xlashard._jax.runtime import dispatch
from xlashard._jax.runtime.execute import Runner
from xlashard._jax.runtime.transfer import HandleType, lacks_buffer
from xlashard._jax.trace.tracing import Tracer
from xlashard._jax.tree_definitions import find_tree_difference
from xlashard.core.array import Array, wrap_tree
from xlashard.core.array.array_class.base import SHARDS, release_shards
from xlashard.core.array.array_class.handles import wrap_result
from xlashard.core.array.cross_process_check import process_copies
from xlashard.core.pjit.arguments import (
    arguments_may_move,
    bare,
    check_alive,
    check_concrete,
    check_unshared,
    check_values,
    may_share,
    split_by_donation,
)
from xlashard.core.pjit.dispatch import explained_nan
from xlashard.core.pjit.lower import check_closed_alive
from xlashard.core.pjit.shardings.resources import check_whole
from xlashard.core.pjit.stages.bound_step_plan import Input, StepPlan, place_state
from xlashard.core.pjit.stages.info import check_type
from xlashard.core.program.execute import CompiledProgram
from xlashard.errors import ArgumentError, DeletedError, NonFiniteError
from xlashard.support.tracebacks import shorten

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
