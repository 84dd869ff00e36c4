"""Command line arguments of the subcommands."""

import argparse


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard preflight``."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Reports the memory, step time, collectives and cost of a program on TPU chips, on a "
        "machine without one."
    )
    parser.epilog = (
        "Exit code: 0 if each program fits and meets its budget, 1 if not, 2 for wrong use."
    )
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="*",
        help="settings of a training run (CONFIG.toml); a function that gives (function, "
        "arguments) (package.module:function); or a stored report (REPORT.json)",
    )
    _add_topology(parser, "NAME[,NAME]", "; several are compared")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh axes and their sizes, one of which may be -1; by default "
        "those of the settings. To try every mesh: auto, or data=auto,tensor=..8",
    )
    parser.add_argument(
        "--price",
        metavar="AMOUNT",
        help="cost per chip-hour: 4.2 or '4.20 USD'; where meshes of several "
        "generations are tried, v5e=1.2,v5p=4.2",
    )
    _add_program(parser)
    _add_results(parser)
    _add_sweep(parser.add_argument_group("where every mesh is tried"))


def _add_topology(parser: argparse.ArgumentParser, metavar: str, besides: str = "") -> None:
    parser.add_argument(
        *("-t", "--topology"),
        metavar=metavar,
        default="",
        help=f"the chips: v5p-128, v5litepod-16, v6e:8x8{besides}; by default those that the "
        "settings name",
    )


def _add_program(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that change a program or its compilation."""
    parser.add_argument("--slices", type=int, metavar="N", help="number of slices (default: 1)")
    add_settings(parser)
    _add_pairs(
        parser,
        "--option",
        "NAME=VALUE",
        "options of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536",
    )


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add ``--set``, for commands with a settings file."""
    _add_pairs(
        parser,
        "--set",
        "KEY=VALUE",
        "settings that override the file, such as model.layers=4",
    )


def _add_pairs(parser: argparse.ArgumentParser, word: str, metavar: str, help_text: str) -> None:
    """Add a repeatable argument with several pairs."""
    parser.add_argument(
        word, metavar=metavar, nargs="+", action="extend", default=[], help=help_text
    )


def _add_results(parser: argparse.ArgumentParser) -> None:
    """Add the arguments for the reports."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report as JSON; a folder for several; - for standard output",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that shows all reports")
    parser.add_argument("--all", action="store_true", help="show every row, not only the largest")
    _add_pairs(
        parser,
        "--budget",
        "KEY=VALUE",
        "limits to check, such as hbm=90%% all_gather_bytes=2GB time=2s mfu=40%%",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what changed from the first report to the second",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of a report, and exit"
    )


def _add_sweep(group: argparse._ArgumentGroup) -> None:
    """Add the arguments of sweeps."""
    group.add_argument(
        "--folder", metavar="FOLDER", help="folder of the results (default: sweeps/NAME)"
    )
    group.add_argument(
        "--workers",
        type=count,
        metavar="N",
        help="number of worker processes; by default as many as CPUs and memory allow",
    )
    group.add_argument(
        "--timeout", type=seconds, default=0.0, metavar="S", help="timeout per mesh in seconds"
    )
    group.add_argument("--again", action="store_true", help="recompile cached results")


def add_compile(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``xlashard compile``."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Compiles a program for TPU chips, on a machine without one, into a file that "
        "Compiled.deserialize loads where the chips are."
    )
    parser.epilog = (
        "Exit code: 0 if the file is there, 1 if the program does not fit, 2 for wrong use."
    )
    parser.add_argument(
        "target",
        metavar="TARGET",
        help="settings of a training run (CONFIG.toml), or a function that gives (function, "
        "arguments) (package.module:function)",
    )
    parser.add_argument(
        *("-o", "--output"), metavar="FILE", help="the file (default: NAME.xlashard)"
    )
    _add_topology(parser, "NAME")
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh axes and their sizes; by default those of the settings",
    )
    _add_program(parser)


def count(text: str) -> int:
    """Parse a positive integer.

    Args:
        text: Command line text.
    """
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of 1 or more")


def seconds(text: str) -> float:
    """Parse a positive number of seconds.

    Args:
        text: Command line text.
    """
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if 0 < found < float("inf"):
        return found
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")


def add_legacy(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `xlashard legacy`."""
    parser.set_defaults(parser=parser)
    parser.usage = "xlashard legacy --migrate FILE ... [--write]"
    parser.description = (
        "Rewrites programs of 2022 and 2023 for today's JAX: imports, pjit, meshes, "
        "GlobalDeviceArray and flags, with their formatting kept. The changes are shown as a diff. "
        "A line that needs a human gets a comment above it that begins with `# xlashard:`. Exit "
        "codes: 0 done, 1 a file could not be read, parsed or written, 2 wrong use."
    )
    parser.epilog = "To run such a program as it is: python -m xlashard.legacy script.py"
    parser.add_argument(
        "--migrate", nargs="+", required=True, metavar="FILE", help="the Python files to rewrite"
    )
    parser.add_argument(
        "--write",
        action="store_true",
        help="write the files after the diff; without this option they stay as they are",
    )
