"""``xlashard compile``: a program compiled for TPU chips here, in a file for where they are."""

import argparse
import sys
from pathlib import Path

from xlashard.analysis.programs.from_pjit import make_stage
from xlashard.analysis.programs.program import Compilation
from xlashard.cli.commands.option_words import command_line_message, read_mesh, read_options
from xlashard.cli.commands.result_files import check_writable, write_bytes
from xlashard.cli.commands.status_line import status_line
from xlashard.cli.commands.targets import find_program, quiet_start, topologies_for
from xlashard.core.pjit.stages.compiled import Compiled
from xlashard.errors import ArgumentError, ProgramTooLargeError, XlashardError
from xlashard.predict.preflight.preflight_run import read_on_topology
from xlashard.predict.preflight.target_loading import user_code_errors
from xlashard.support.formatting import in_bytes, print_error, sizes_text


def run(arguments: argparse.Namespace) -> int:
    """Compile a program and write it to a file.

    Args:
        arguments: The words, parsed.

    Returns:
        The exit code: 0 if the file is there, 1 if the program does not fit, 2 for wrong use.
    """
    quiet_start()
    try:
        return _run(arguments)
    except ProgramTooLargeError as error:
        print_error(error)
        chips = f"--topology {arguments.topology} " if arguments.topology else ""
        words = f"xlashard preflight {chips}{arguments.target}"
        print(f"What takes so much: {words}", file=sys.stderr)
        return 1
    except XlashardError as error:
        print_error(command_line_message(error))
        return 2


def _run(arguments: argparse.Namespace) -> int:
    target = arguments.target
    name = Path(target.rpartition(":")[2]).name.removesuffix(".toml")
    file = Path(arguments.output or f"{name}.xlashard")
    places = topologies_for(target, arguments.topology, arguments.slices, arguments.set)
    if len(places) > 1:
        raise ArgumentError(
            f"one file holds the program of one topology: write --topology {places[0]}"
        )
    (place,) = places
    axes = read_mesh(arguments.mesh) if arguments.mesh else None
    options = read_options(arguments.option)
    check_writable(str(file))
    with status_line(f"compiling {target} for {place}"):
        program = find_program(target, place, axes, arguments.set)
        with user_code_errors(f"{target} can't be traced"):
            mesh, lowered, _ = read_on_topology(
                program.function, program.args, dict(program.kwargs), place, program.mesh
            )
            if isinstance(lowered, Compilation):
                raise ArgumentError(  # no-catalogue: an error of xlashard compile
                    f"{lowered.name} is a Compiled already: pass its Lowered, or the function and "
                    "its arguments"
                )
            compiled = make_stage(lowered, options or None)
    write_bytes(str(file), compiled.serialize())
    axes_text = sizes_text(mesh.shape.items())
    print(f"{file}: {_described(compiled, file)}, for {place} as {axes_text}")
    print(f'Compiled.deserialize(Path("{file}").read_bytes()) loads it where they are')
    return 0


def _described(compiled: Compiled, file: Path) -> str:
    memory = compiled.memory_analysis()
    peak = in_bytes(memory.peak_memory_in_bytes)
    return f"{in_bytes(file.stat().st_size)}, {compiled.fun_name} takes {peak} of each device"
