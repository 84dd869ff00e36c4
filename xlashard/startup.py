"""Environment variables that concern JAX, applied when `xlashard` is imported."""

from typing import TYPE_CHECKING

from xlashard._jax.registration import apply_flags
from xlashard.config import Flags
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.analysis.recompile import explain_recompile
    from xlashard.pods.multihost import program_checks
else:
    explain_recompile = deferred("xlashard.analysis.recompile.explain_recompile")
    program_checks = deferred("xlashard.pods.multihost.program_checks")


def apply(flags: Flags) -> None:
    """Apply the settings of JAX, and start what the variables request of `jax.jit`.

    Args:
        flags: Settings of the environment.
    """
    apply_flags(flags)
    if flags.explain_recompiles:
        explain_recompile.watch()
    if flags.check_jit_programs:
        program_checks.watch_jit_programs()
