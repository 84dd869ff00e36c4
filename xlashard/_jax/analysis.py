"""What jaxlib can say of a module or of a compiled program."""

import re
from typing import Any

import jaxlib
from jax._src.lib import hlo
from jax._src.lib import xla_client as xc

from xlashard._jax import modules


def jaxlib_version() -> str:
    """The version of jaxlib."""
    return jaxlib.__version__


def compiled_text(executable: Any) -> str:
    """The optimised HLO."""
    return "\n\n".join(m.to_string() for m in executable.hlo_modules())


def compiled_cost(executable: Any) -> dict[str, float]:
    """XLA's estimates for the optimised program: FLOP, bytes accessed, ..."""
    found = executable.cost_analysis()
    return dict(found[0] if isinstance(found, list | tuple) else found)


def compiled_memory(executable: Any) -> Any:
    """Bytes per device: arguments, results, aliases, temporaries, code."""
    return executable.get_compiled_memory_stats()


def alias_bytes(executable: Any) -> int | None:
    """How many bytes of its arguments its results take over, on each device; None if unknown."""
    try:
        return executable.get_compiled_memory_stats().alias_size_in_bytes
    except Exception:  # not every PJRT plugin answers
        return None


def extra_bytes(executable: Any) -> int | None:
    """How much memory a run takes on each device, arguments and results apart; None if unknown.

    Results that take over an argument's memory make it less.
    """
    try:
        found = executable.get_compiled_memory_stats()
        return found.temp_size_in_bytes - found.alias_size_in_bytes
    except Exception:  # not every PJRT plugin answers
        return None


def aliases(executable: Any) -> dict[int, int]:
    """For each result that takes over an argument's buffers, that argument."""
    return aliases_in(executable.hlo_modules()[0].to_string().partition("\n")[0])


def aliases_in(header: str) -> dict[int, int]:
    """The same, from the first line of a module's text."""
    _, _, rest = header.partition("input_output_alias={")
    found = {}
    for result, argument, part in _ALIAS.findall(rest[: _closing(rest)]):
        # Arguments that travel as one tuple are its parts.
        found[int(result or 0)] = int(part or argument)
    return found


_ALIAS = re.compile(r"\{(\d*)\}: \((\d+), \{(\d*)\}")


def _closing(text: str) -> int:
    """Where the brace closes that was open before a text."""
    depth = 1
    for i, letter in enumerate(text):
        depth += (letter == "{") - (letter == "}")
        if not depth:
            return i
    return len(text)


def lowered_cost(client: Any, module: Any) -> dict[str, float]:
    """XLA's estimates for the module as it is, before optimisation."""
    return dict(xc._xla.hlo_module_cost_analysis(client, _hlo(module)))


def hlo_text(module: Any, *, debug_info: bool = False) -> str:
    """The module as HLO text, with or without where each operation comes from."""
    options = hlo.HloPrintOptions()
    options.print_metadata = debug_info
    return _hlo(module).to_string(options)


def hlo_computation(module: Any) -> Any:
    """The module as XLA's computation."""
    return xc._xla.mlir.mlir_module_to_xla_computation(
        modules.to_bytecode(module), use_tuple_args=False, return_tuple=False
    )


def _hlo(module: Any) -> Any:
    return hlo_computation(module).as_hlo_module()
