"""References (`jax.new_ref`): arrays that a program writes to in place.

XLA knows values only. So a program takes what a reference holds as one more argument and gives what
it is to hold as one more result, which takes over the argument's buffers.
"""

from typing import Any

from jax._src import core
from jax._src.interpreters import partial_eval as pe
from jax._src.state.discharge import discharge_state
from jax._src.state.types import AbstractRef

type Jaxpr = Any
type Handle = Any


def is_ref(value: Any) -> bool:
    """Whether a value is a reference to buffers; one inside a trace is none."""
    # JAX takes its tracers of references for instances, too.
    return type(value) is core.Ref


def buffer_of(ref: core.Ref) -> Handle:
    """The handle of what a reference holds now."""
    return ref._refs._buf


def write(ref: core.Ref, handle: Handle) -> None:
    """Lets a reference hold another array of its type."""
    ref._refs._buf = handle


def is_reference(aval: Any) -> bool:
    """Whether an argument of this abstract value is a reference."""
    return isinstance(aval, AbstractRef)


def without_references(jaxpr: Jaxpr) -> tuple[Jaxpr, tuple[int, ...]]:
    """The same computation on values.

    Args:
        jaxpr: A closed jaxpr; references that it closes over are among its arguments already.

    Returns:
        A jaxpr that takes values for references, and the positions of those arguments whose new
        values it gives behind its results.
    """
    taken = [i for i, aval in enumerate(jaxpr.in_avals) if is_reference(aval)]
    makes_own = any(isinstance(e, core.InternalMutableArrayEffect) for e in jaxpr.effects)
    if not taken and not makes_own:
        return jaxpr, ()
    pure = discharge_state(jaxpr)
    results = len(jaxpr.outvars)
    # What is only read comes out as it went in.
    written = [pure.outvars[k] is not pure.invars[i] for k, i in enumerate(taken, start=results)]
    pure = pe.prune_jaxpr_outputs(pure, [*(True,) * results, *written])
    positions = tuple(i for i, w in zip(taken, written, strict=True) if w)
    debug = jaxpr.debug_info
    names = debug.safe_arg_names(len(pure.invars))
    paths = debug.safe_result_paths(results)
    debug = debug._replace(arg_names=names, result_paths=(*paths, *(names[i] for i in positions)))
    return pure.replace(debug_info=debug), positions
