"""``xlashard run``: a script as it is, under the settings of xlashard."""

import argparse
from contextlib import suppress

import xlashard
from xlashard import program_runner
from xlashard.commands.script_run import when_imported
from xlashard.commands.script_words import change_interpreter, parse_script
from xlashard.errors import ArgumentError, XlashardError
from xlashard.wording import print_error


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard run``.

    Args:
        arguments: The words, parsed; `script` has those after `--`.

    Returns:
        The exit code of a script that ends well: 0; 2 for wrong use. A script that fails ends the
        process as it would end Python.
    """
    try:
        if not arguments.script:
            raise ArgumentError("which program? Write xlashard run -- python train.py")
        script = parse_script(arguments.script)
        change_interpreter(script, arguments.command_line, arguments.script)
        with when_imported("jax", _apply_settings):
            program_runner.run(script.program)
    except program_runner.ProgramNotFoundError as error:
        print_error(error)
        return 2
    except XlashardError as error:
        print_error(error)
        return 2
    return 0


def _apply_settings() -> None:
    """Run the body of the package, which reads the variables of the environment.

    JAX may be imported by that body itself, which is not complete then.
    """
    with suppress(AttributeError):
        _ = xlashard.Array
