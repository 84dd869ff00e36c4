"""``xlashard reshard-checkpoint``: a checkpoint copied to other shardings, in little memory."""

import argparse
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jax.sharding import AxisType

from xlashard.auto.plan.plan_model import spec_of_text
from xlashard.cli.commands.option_words import command_line_message, read_mesh
from xlashard.cli.commands.status_line import status_line
from xlashard.core.pjit.shardings.path_rules import PathRules, read_path_rules
from xlashard.core.sharding import AbstractMesh
from xlashard.errors import ArgumentError, XlashardError, counted
from xlashard.support.consoles import print_json
from xlashard.support.formatting import in_bytes, print_error, sizes_text
from xlashard.support.host_memory import PeakMemory
from xlashard.train.checkpoint.process_sync import find_reason
from xlashard.train.checkpoint.resharding import CheckpointCopy, open_source


def run(arguments: argparse.Namespace) -> int:
    """Copy a checkpoint.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: 0 if the copy is there, 1 if a disk failed, 2 for wrong use.
    """
    try:
        return _run(arguments)
    except XlashardError as error:
        print_error(command_line_message(error))
        return 2
    except (OSError, ValueError) as error:
        # ValueErrors are those of TensorStore.
        print_error(f"{arguments.destination} was not written: {find_reason(error)}")
        return 1


def _run(arguments: argparse.Namespace) -> int:
    destination = Path(arguments.destination)
    source = open_source(Path(arguments.source))
    is_file = destination.name.endswith(".safetensors")
    form = arguments.format or ("safetensors" if is_file else "orbax")
    mesh, rules = _read_layout(arguments, form)
    request = CheckpointCopy(
        source, destination, form, arguments.memory_limit, mesh, rules, arguments.file_size
    )
    request.check()
    unmatched = 0
    if rules is not None:
        unmatched = len(source.arrays) - len(request.find_named_shardings())
    peak, began = PeakMemory(), time.perf_counter()
    with status_line(f"copying {in_bytes(source.total_bytes)}"):
        request.run()
    facts = {
        "destination": str(destination),
        "format": form,
        "arrays": len(source.arrays),
        "bytes": source.total_bytes,
        "mesh": dict(mesh.shape) if mesh is not None else None,
        "unmatched": unmatched,
        "memory_limit_bytes": arguments.memory_limit,
        "peak_bytes": peak.read(),
        "seconds": round(time.perf_counter() - began, 3),
    }
    if arguments.json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _print(facts: dict[str, Any]) -> None:
    place = f", sharded over {sizes_text(facts['mesh'].items())}" if facts["mesh"] else ""
    print(
        f"{facts['destination']}: {counted(facts['arrays'], 'array')}, {in_bytes(facts['bytes'])}, "
        f"{facts['format']}{place}"
    )
    if facts["unmatched"]:
        print(f"{counted(facts['unmatched'], 'array')} that no rule matches, whole")
    peak = facts["peak_bytes"]
    text = "unknown on this system" if peak is None else in_bytes(peak)
    print(
        f"peak memory {text} above the start, of {in_bytes(facts['memory_limit_bytes'])}; "
        f"{facts['seconds']:.1f} s"
    )


def _read_layout(
    arguments: argparse.Namespace, form: str
) -> tuple[AbstractMesh | None, PathRules | None]:
    """Return the mesh and the rules; None for safetensors.

    Raises:
        ArgumentError: They are missing, or there are any for safetensors.
    """
    if form == "safetensors":
        if arguments.mesh or arguments.rules:
            raise ArgumentError(
                "--mesh and --rules shard a checkpoint of orbax, and DST is of safetensors, which "
                "holds whole arrays: leave both out, or write --format orbax"
            )
        return None, None
    if not arguments.mesh:
        raise ArgumentError("--mesh is missing: write the axes of the job, --mesh data=8,model=4")
    axes = read_mesh(arguments.mesh)
    if min(axes.values()) < 1:
        raise ArgumentError(
            f"--mesh {arguments.mesh} has an axis without devices: write sizes of 1 or more"
        )
    types = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
    return mesh, read_path_rules(_read_rules(arguments.rules), "--rules")


def _read_rules(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Return pairs of patterns and specs.

    Raises:
        ArgumentError: A word is no such pair.
    """
    rules = []
    for word in words:
        match = re.fullmatch(r"(.*?)=(P\(.*\))", word)
        try:
            if match is None:
                raise ValueError("not PATTERN=SPEC")
            rules.append((match[1], spec_of_text(match[2])))
        except ValueError as error:
            raise ArgumentError(
                f"--rules {word} is {error}: write --rules \"kernel$=P('data', None)\""
            ) from None
    return rules
