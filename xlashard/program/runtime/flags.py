"""Flags of the compiler, and their differences between two processes.

A program keeps the flags of its compilation. Other flags in the loading process mean that this
process would have compiled another program, which is reported.
"""

import os
from collections.abc import Mapping
from pathlib import Path

type Flags = tuple[tuple[str, str], ...]
"""Names and texts of the environment variables with flags."""

_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PREFIX = "--xla_"
NOT_COMPILED_IN = (
    *("--xla_dump_", "--xla_force_host_platform_device_count", "--xla_hlo_profile"),
    *("--xla_tpu_use_enhanced_launch_barrier", "--xla_gpu_cuda_data_dir", "--xla_cpu_collective_"),
    *("--xla_gpu_per_fusion_autotune_cache_dir", "--xla_gpu_kernel_cache_file"),
)
"""Flags that do not change the program: output folders, the number of host devices, and flags that
JAX sets on a TPU."""
_OF_PLATFORMS = {"cpu": "--xla_cpu_", "tpu": "--xla_tpu_", "gpu": "--xla_gpu_"}


def flags_here() -> Flags:
    """Return the compiler flags of this process."""
    return tuple((name, os.environ[name]) for name in _VARIABLES if os.environ.get(name))


def flag_differences(saved: Flags, here: Flags, platform: str) -> list[str]:
    """Return the differences of flags that affect the compilation for a platform, as texts.

    Args:
        saved: Flags of a program's compilation.
        here: Flags of another process.
        platform: `cpu`, `tpu`, `cuda`, ...
    """
    old, new = (_compiled_in(flags, platform) for flags in (saved, here))
    found = []
    for variable, name in dict.fromkeys([*old, *new]):
        was, now = old.get((variable, name)), new.get((variable, name))
        if was == now:
            continue
        if now is None:
            found.append(f"it was compiled with {name}={was} in {variable}, which is not set here")
        elif was is None:
            found.append(f"it was compiled without {name}, and {variable} has {name}={now} here")
        else:
            found.append(f"it was compiled with {name}={was} in {variable}, which is {now} here")
    return found


def _compiled_in(flags: Flags, platform: str) -> Mapping[tuple[str, str], str]:
    """Return the values of flags that matter, by variable and name; the last one counts."""
    own = platform if platform in ("cpu", "tpu") else "gpu"
    others = tuple(prefix for name, prefix in _OF_PLATFORMS.items() if name != own)
    found: dict[tuple[str, str], str] = {}
    for variable, text in flags:
        if variable == "LIBTPU_INIT_ARGS" and own != "tpu":
            continue
        for word in _words(text):
            name, _, value = word.partition("=")
            if name.startswith(_PREFIX) and not name.startswith((*NOT_COMPILED_IN, *others)):
                found[variable, name] = value or "true"
    return found


def _words(text: str) -> list[str]:
    """Return the flags in a variable's text, or in the file that it names."""
    if text.lstrip().startswith("-"):
        return text.split()
    try:
        return Path(text.strip()).read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
