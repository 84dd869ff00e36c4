"""Observe `jax.jit` in this process: the programs that it lowers and calls, and its cache misses.

JAX is changed only while there is an observer: functions of its Python path are replaced, and put
back when the last observer ends. Observers of programs keep calls on that path instead of the C++
dispatcher, so that every call is seen. Observers of misses don't: only a call that misses the
dispatcher's cache reaches the functions that are replaced for them, so repeat calls cost what they
cost without it.
"""

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from itertools import count
from typing import Any, Literal, Protocol

import jax

from xlashard._jax.private import core, jax_pjit, replace_name
from xlashard._jax.runtime.dispatch import forget_calls
from xlashard._jax.runtime.shardings import UNSPECIFIED
from xlashard._jax.runtime.tracebacks import JAX_FOLDER, callers
from xlashard._jax.trace.jaxprs import drop_unused, hoist, is_ref
from xlashard._jax.trace.jitted import INFER_PARAMS_LOCK
from xlashard._jax.trace.primitive_names import DEVICE_PROGRAMS
from xlashard._jax.trace.tracing import equations, struct_of
from xlashard.support.lazily import dataclass


class ObservedProgram(Protocol):
    """A program that is lowered or called: one of `jax.jit`, or of a function of this package.

    Attributes:
        key: Equal for programs that share an executable.
        name: The function's name.
        jaxpr: Its closed jaxpr.
        values: Types of the arguments; those that are committed have shardings.
    """

    @property
    def key(self) -> Hashable: ...
    @property
    def name(self) -> str: ...
    @property
    def jaxpr(self) -> Any: ...
    @property
    def values(self) -> tuple[jax.ShapeDtypeStruct, ...]: ...


@dataclass(frozen=True, eq=False)
class ObservedCall:
    """A call of a program.

    Attributes:
        program: The program.
        arguments: Its arguments, flat.
        run: Runs it and returns its results, flat.
    """

    program: ObservedProgram
    arguments: Sequence[Any]
    run: Callable[[], list[Any]]


class ProgramObserver(Protocol):
    """Receiver of programs; the calls come from any thread."""

    def lowered(self, program: ObservedProgram) -> None:
        """Receive a program that is lowered."""
        ...

    def called(self, call: ObservedCall) -> list[Any]:
        """Receive a call, and return its results, usually `call.run()`."""
        ...

    def failed(self, error: Exception) -> None:
        """Receive the exception of a function of `jax.jit` that can't be traced."""
        ...


@dataclass(frozen=True, eq=False)
class JitLowering:
    """A program of `jax.jit`, with what JAX lowers it from.

    Attributes:
        jaxpr: Its closed jaxpr.
        params: Shardings, layouts, donation, mesh and options, by the names of JAX's `jit_p`.
        types: Type, sharding and commitment of each argument.
    """

    jaxpr: Any
    params: Mapping[str, Any]
    types: tuple[Any, ...]

    @property
    def name(self) -> str:
        """Return the function's name."""
        return self.params["name"]

    @cached_property
    def key(self) -> Hashable:
        """Return a value that equal programs share."""
        places = tuple([(t.aval, t.sharding if t.committed else None) for t in self.types])
        return self.jaxpr, tuple(sorted(self.params.items())), places

    @cached_property
    def used(self) -> tuple[bool, ...]:
        """Return for each argument True if it is one of the module's.

        JAX drops an argument of which a program takes the shape only, with its devices.
        """
        if self.params["keep_unused"]:
            return (True,) * len(self.types)
        return drop_unused(self.jaxpr)[1]

    def with_constants_as_arguments(self, sharding: Any) -> "JitLowering":
        """Return the program with the arrays that it closes over as its first arguments.

        Args:
            sharding: Their sharding; None leaves it open.
        """
        jaxpr, values = hoist(self.jaxpr, [not is_ref(value) for value in self.jaxpr.consts])
        nowhere = {"sharding": None, "format": None, "committed": False, "is_np_array": False}
        types = [jax_pjit.convert_to_metaty(value).replace(**nowhere) for value in values]
        new = {
            "in_shardings": UNSPECIFIED if sharding is None else sharding,
            "in_layouts": None,
            "donated_invars": False,
        }
        params = {name: (*(v,) * len(values), *self.params[name]) for name, v in new.items()}
        return JitLowering(jaxpr, {**self.params, **params}, (*types, *self.types))

    @property
    def values(self) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return the types of the arguments; those that are committed have shardings."""
        return tuple([struct_of(t.aval, t.sharding if t.committed else None) for t in self.types])


def is_operation(jaxpr: Any) -> bool:
    """Return True for a program of a function that JAX defines, such as `jnp.add`.

    JAX runs an operation outside of `jit` as a program of its own.
    """
    info = jaxpr.debug_info.func_src_info or ""
    if " at " not in info:
        return True
    if JAX_FOLDER not in info:
        return False
    # JAX wraps a function of the user in `jax.pmap` and `jax.jit(pl.pallas_call(kernel, ...))`.
    return all(eqn.primitive.name not in DEVICE_PROGRAMS for eqn in equations(jaxpr))


def runs_kernels(jaxpr: Any) -> bool:
    """Return True for a program with Pallas kernels, which run on one kind of chips."""
    return any(eqn.primitive.name == "pallas_call" for eqn in equations(jaxpr))


def trees_under_way(jaxpr: Any) -> tuple[Any, Any] | None:
    """Return the trees of arguments and result of the program that this thread lowers or calls.

    JAX passes neither on to where programs are observed; the frames that made the call have them.

    Args:
        jaxpr: The program's jaxpr; None is returned for a call of another one.
    """
    for frame in callers():
        is_of_jax = frame.f_code.co_filename.startswith(JAX_FOLDER)
        name, local = frame.f_code.co_name, frame.f_locals if is_of_jax else {}
        if name == "_run_python_pjit" and local["p"].params["jaxpr"] is jaxpr:
            return local["p"].in_tree, local["p"].out_tree
        if name == "lower" and getattr(local.get("self"), "jaxpr", None) is jaxpr:
            return local["self"]._in_tree, local["self"].out_tree
    return None


def function_under_way(jaxpr: Any) -> int:
    """Return a number of the function object that this thread calls; 0 where that is unknown.

    Args:
        jaxpr: The jaxpr of the program that is called.
    """
    for frame in callers():
        if frame.f_code.co_name == "_run_python_pjit" and "fun" in frame.f_locals:
            local = frame.f_locals
            return number_function(local["fun"]) if local["p"].params["jaxpr"] is jaxpr else 0
    return 0


def number_function(fun: Any) -> int:
    """Return the number of a function object, which no other object of this process has."""
    return _numbers.setdefault(fun, next(_count))


_count = count(1)
_numbers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def caller_locals(file: str, function: str) -> dict[str, Any] | None:
    """Return the variables of the innermost frame of a function that calls; None without one.

    Args:
        file: End of the path of its file.
        function: Its name.
    """
    for frame in callers():
        if frame.f_code.co_name == function and frame.f_code.co_filename.endswith(file):
            return frame.f_locals
    return None


def pmap_under_way() -> tuple[Any, Sequence[Any], Mapping[str, Any]] | None:
    """Return function and arguments of the call of `jax.pmap` that this thread makes.

    Static arguments are None. No public function of JAX has them. None is returned without a call,
    and where JAX keeps them otherwise.
    """
    values = caller_locals(_PMAP_FILE, "wrapped") or caller_locals(_PMAP_FILE, "lower") or {}
    try:
        own = inspect.getclosurevars(values["infer_params"]).nonlocals
        user, static = own["wrapped_fun"].f, own["static_broadcasted_tuple"]
        args = [None if i in static else arg for i, arg in enumerate(values["args"])]
        return user, args, values["kwargs"]
    except (AttributeError, KeyError, TypeError):
        return None


_PMAP_FILE = "jax/_src/pmap.py"
_lock = threading.Lock()
_thread = threading.local()
all_observers: tuple[ProgramObserver, ...] = ()
"""Observers of any thread. Each call reads them, and calls `observers()` only if there are any."""
_PATCHED = ("_resolve_and_lower", "_pjit_call_impl_python", "_trace_for_jit")
_originals: dict[str, Any] = {}
_stage_methods: dict[str, Any] = {}
_lowered: weakref.WeakKeyDictionary[Any, JitLowering] = weakref.WeakKeyDictionary()
"""Programs by what JAX lowered them to, for calls of their executables."""


def observers() -> tuple[ProgramObserver, ...]:
    """Return the observers of this thread's programs, the latest one last."""
    return () if all_observers and is_paused() else all_observers


def is_paused() -> bool:
    """Return True inside of `unobserved`."""
    return getattr(_thread, "is_paused", False)


@contextmanager
def unobserved() -> Iterator[None]:
    """Send no program of this thread to the observers, and record no cache miss of it.

    What a report traces and compiles is no part of the user's program.
    """
    before = is_paused()
    _thread.is_paused = True
    try:
        yield
    finally:
        _thread.is_paused = before


def observe(observer: ProgramObserver) -> Callable[[], None]:
    """Send the programs of this process to an observer.

    Returns:
        A function that ends it.
    """
    global all_observers
    with _lock:
        if not all_observers:
            _install()
        all_observers = (*all_observers, observer)

    def end() -> None:
        global all_observers
        with _lock:
            all_observers = tuple([o for o in all_observers if o is not observer])
            if not all_observers:
                _uninstall()

    return end


def observed(call: ObservedCall) -> list[Any]:
    """Send a call to the observers, and return its results."""
    for observer in observers():
        call = ObservedCall(call.program, call.arguments, partial(observer.called, call))
    return call.run()


def _install() -> None:
    # The dispatchers would repeat the calls that they know without JAX's Python code.
    forget_calls()
    _originals.update({name: getattr(jax_pjit, name) for name in _PATCHED})
    replace_name(jax_pjit, "_resolve_and_lower", _lower)
    replace_name(jax_pjit, "_pjit_call_impl_python", _call)
    replace_name(jax_pjit, "_trace_for_jit", _trace)
    _stage_methods.update(compile=jax.stages.Lowered.compile, call=jax.stages.Compiled.__call__)
    jax.stages.Lowered.compile, jax.stages.Compiled.__call__ = _compile, _call_compiled


def _uninstall() -> None:
    jax.stages.Lowered.compile = _stage_methods["compile"]
    jax.stages.Compiled.__call__ = _stage_methods["call"]
    for name in _PATCHED:
        replace_name(jax_pjit, name, _originals[name])
    # They would leave the calls that they have seen since to JAX's Python code.
    forget_calls()


def _trace(*args: Any, **kwargs: Any) -> Any:
    """Replace JAX's `_trace_for_jit`, inside of which tracebacks have all their frames."""
    is_inner, _thread.is_tracing = getattr(_thread, "is_tracing", False), True
    try:
        return _originals["_trace_for_jit"](*args, **kwargs)
    except Exception as error:
        for observer in () if is_inner else observers():
            observer.failed(error)
        raise
    finally:
        _thread.is_tracing = is_inner


_LOWERING = ("lowering_platforms", "lowering_parameters", "pgle_profiler")


def _lower(args: Sequence[Any], **params: Any) -> Any:
    """Replace JAX's `_resolve_and_lower`, which both calls and `lower()` go through."""
    own = {name: value for name, value in params.items() if name not in _LOWERING}
    program = JitLowering(own.pop("jaxpr"), own, tuple(args))
    for observer in observers():
        observer.lowered(program)
    lowered = _originals["_resolve_and_lower"](args, **params)
    _lowered[lowered] = program
    return lowered


def _compile(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Lowered.compile`: the executable has its program."""
    compiled = _stage_methods["compile"](self, *args, **kwargs)
    compiled._xlashard_program = _lowered.get(self._lowering)
    return compiled


def _call_compiled(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Replace `Compiled.__call__`."""
    run = partial(_stage_methods["call"], self, *args, **kwargs)
    program = getattr(self, "_xlashard_program", None)
    if program is None or not observers():
        return run()
    call = ObservedCall(
        program, jax.tree.leaves((args, kwargs)), lambda: self.out_tree.flatten_up_to(run())
    )
    return self.out_tree.unflatten(observed(call))


def _call(*args: Any, jaxpr: Any, **params: Any) -> Any:
    """Replace JAX's `_pjit_call_impl_python`.

    Without an executable in the result, JAX doesn't cache the call in its dispatcher.
    """
    run = partial(_originals["_pjit_call_impl_python"], *args, jaxpr=jaxpr, **params)
    program = JitLowering(jaxpr, params, tuple(map(jax_pjit.convert_to_metaty, args)))
    return observed(ObservedCall(program, args, lambda: run()[0])), None, None, []


type Stage = Literal["trace", "lower", "compile"]


_STAGES: dict[str, Stage] = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
"""The stage that each event of `jax.monitoring` reports."""
_CACHE_HIT = "/jax/compilation_cache/cache_hits"


@dataclass(frozen=True, eq=False)
class JitFunction:
    """A function that `jax.jit` made.

    Attributes:
        fun: The Python function.
        options: The options of `jax.jit`, as JAX keeps them.
    """

    fun: Callable[..., Any]
    options: Any

    @property
    def name(self) -> str:
        """Return the function's name."""
        return jax_pjit.fun_name(self.fun)


@dataclass(eq=False)
class JitCall:
    """A call of a function of `jax.jit` that missed the dispatcher's cache.

    Attributes:
        function: The function.
        arguments: Its arguments as `(args, kwargs)`; None once the call or the trace has ended.
        record: For the observer.
    """

    function: JitFunction
    arguments: tuple[tuple[Any, ...], dict[str, Any]] | None
    record: Any = None


type MissObserver = Callable[[JitCall, Stage, float, str | None], None]
"""Receives a call, a stage that it ran, its seconds, and the origin of a compiled executable."""


class _Thread(threading.local):
    """State of one thread.

    Attributes:
        call: The call whose stages run, or ran last.
        traced: Seconds of tracing since the call began.
        hit: True once the persistent cache had the program.
    """

    call: JitCall | None = None
    traced: float = 0.0
    hit: bool = False


_THREAD = _Thread()


def watch_misses(observer: MissObserver) -> Callable[[], None]:
    """Report cache misses of functions that `jax.jit` made to an observer, one at a time.

    Calls inside another trace are part of the outer program, and JAX's own functions, such as those
    of `jax.numpy`, are left out.

    Args:
        observer: The observer, called in the thread of the call. Its exceptions are dropped: they
            must not break a call.

    Returns:
        A function that ends it, and puts back what it replaced in JAX.
    """
    watch = _MissWatch(observer)
    watch.begin()
    return watch.end


class _MissWatch:
    """Replacement of JAX's functions that a cache miss runs, and listeners to its stages."""

    def __init__(self, observer: MissObserver) -> None:
        self._observer: MissObserver | None = observer
        self._infer, self._run = jax_pjit._infer_params, jax_pjit._run_python_pjit

    def begin(self) -> None:
        with INFER_PARAMS_LOCK:
            self._infer, self._run = jax_pjit._infer_params, jax_pjit._run_python_pjit
            replace_name(jax_pjit, "_infer_params", self._infer_params)
            replace_name(jax_pjit, "_run_python_pjit", self._run_python_pjit)
        jax.monitoring.register_event_duration_secs_listener(self._on_duration)
        jax.monitoring.register_event_listener(self._on_event)

    def end(self) -> None:
        self._observer = None
        with INFER_PARAMS_LOCK:
            # A function that another library has put in front of ours calls it, and it JAX's.
            if jax_pjit._infer_params == self._infer_params:
                replace_name(jax_pjit, "_infer_params", self._infer)
            if jax_pjit._run_python_pjit == self._run_python_pjit:
                replace_name(jax_pjit, "_run_python_pjit", self._run)
        # JAX asserts that a listener is registered; `clear_event_listeners` drops them all.
        with suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_duration_listener(self._on_duration)
        with suppress(AssertionError, ValueError):
            jax.monitoring.unregister_event_listener(self._on_event)

    def _report(
        self, call: JitCall, stage: Stage, seconds: float, source: str | None = None
    ) -> None:
        observer = self._observer
        if observer is None:
            return
        # For instance a deleted argument, about which JAX will raise.
        with suppress(Exception):
            observer(call, stage, seconds, source)

    def _infer_params(self, fun: Any, options: Any, args: Any, kwargs: Any) -> Any:
        is_watched = self._observer is not None and not is_paused()
        if not is_watched or not core.trace_state_clean() or _is_of_jax(fun):
            return self._infer(fun, options, args, kwargs)
        _THREAD.call = call = JitCall(JitFunction(fun, options), (args, kwargs))
        _THREAD.traced = 0.0
        try:
            result = self._infer(fun, options, args, kwargs)
            if _THREAD.traced:
                self._report(call, "trace", _THREAD.traced)
            return result
        finally:
            call.arguments = None

    def _run_python_pjit(self, params: Any, leaves: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        call = _THREAD.call
        if call is None or call.function.fun is not fun or not core.trace_state_clean():
            return self._run(params, leaves, fun, args, kwargs)
        call.arguments = args, kwargs
        try:
            return self._run(params, leaves, fun, args, kwargs)
        finally:
            _THREAD.call = None

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        stage, call = _STAGES.get(event), _THREAD.call
        if stage is None or call is None:
            return
        if stage == "trace":
            # Functions inside the traced one report their own, which are part of its time.
            _THREAD.traced = max(_THREAD.traced, duration_secs)
        elif kwargs.get("fun_name") == f"jit({call.function.name})":
            hit, _THREAD.hit = _THREAD.hit, False
            source = "the persistent cache" if hit else "the compiler"
            self._report(call, stage, duration_secs, source if stage == "compile" else None)

    def _on_event(self, event: str, **_: Any) -> None:
        if event == _CACHE_HIT:
            _THREAD.hit = True


def _is_of_jax(fun: Any) -> bool:
    return str(getattr(fun, "__module__", "")).startswith("jax.")
