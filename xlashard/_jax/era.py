"""What programs of 2022 and 2023 reach for inside of JAX, where it is there today."""

from collections.abc import Callable
from typing import Any

# Each of these two is imported by JAX only when it is asked for. The era's modules stand in place
# of them, and need them loaded before.
import jax.core
import jax.experimental.multihost_utils
import jax.experimental.pjit
import jax.extend.backend
import jax.extend.core
import jax.extend.linear_util
import jax.extend.random
from jax._src import compilation_cache as inner_compilation_cache
from jax._src import core as inner_core
from jax._src import linear_util as inner_functions
from jax._src import random as inner_random
from jax._src import util as inner_util
from jax._src import xla_bridge as inner_bridge
from jax._src.array import ArrayImpl
from jax._src.compiler import get_compile_options
from jax._src.lib import _jax as inner_extension
from jax._src.lib import xla_client as inner_client
from jax._src.random import prng as inner_prng

# Modules, and not their names one by one: what a program reaches for is listed where it does so.
core: Any = inner_core
jaxprs: Any = jax.extend.core
functions: Any = jax.extend.linear_util
linear_util: Any = inner_functions
util: Any = inner_util
xla_bridge: Any = inner_bridge
xla_client: Any = inner_client
xla_extension: Any = inner_extension
generators: Any = jax.extend.random
key_types: Any = inner_prng
random: Any = inner_random
compilation_cache: Any = inner_compilation_cache
backend: Any = jax.extend.backend
compile_options: Any = get_compile_options


def concrete_class(shown: type) -> Any:
    """The class whose instances JAX gives out for one that it shows: of arrays, that of handles."""
    return ArrayImpl if shown is jax.Array else shown


def tell_when_set(flag: Any, told: Callable[[], None]) -> Callable[[], None]:
    """Calls a function each time that a setting is given a value.

    Args:
        flag: The setting.
        told: The function.

    Returns:
        Ends that.
    """
    before = flag._update_global_hook, flag._update_thread_local_hook

    def then(hook: Callable[[Any], None] | None) -> Callable[[Any], None]:
        def both(value: Any) -> None:
            if hook is not None:
                hook(value)
            told()

        return both

    def end() -> None:
        flag._update_global_hook, flag._update_thread_local_hook = before

    flag._update_global_hook, flag._update_thread_local_hook = map(then, before)
    return end
