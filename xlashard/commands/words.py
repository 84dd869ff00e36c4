"""The words of the command line that are many: each command's in a function of its own."""

import argparse


def add_preflight(parser: argparse.ArgumentParser) -> None:
    """The words of ``xlashard preflight``."""
    parser.set_defaults(parser=parser)
    parser.description = (
        "Says what a program would take, do and cost on TPU chips, on a machine without one: "
        "whether it fits, how long a step takes and what it waits for, what goes over which "
        "links, and why."
    )
    parser.epilog = (
        "Exit code: 0 if each program fits and keeps its budget, 1 if not, 2 for wrong use."
    )
    parser.add_argument(
        "targets",
        metavar="TARGET",
        nargs="*",
        help="settings of a training run (CONFIG.toml); a function that gives (function, "
        "arguments) (package.module:function); or a report that was kept (REPORT.json)",
    )
    parser.add_argument(
        *("-t", "--topology"),
        metavar="NAME[,NAME]",
        default="",
        help="the chips: v5p-128, v5litepod-16, v6e:8x8; several to look at each",
    )
    parser.add_argument(
        "--slices", type=int, default=1, metavar="N", help="how many slices of it (default: 1)"
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=N[,AXIS=N]",
        default="",
        help="the mesh axes and their sizes, one of which may be -1 for what is left; by default "
        "those of the settings",
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="settings that win over the file's, such as model.layers=4",
    )
    parser.add_argument(
        "--price",
        metavar="AMOUNT",
        help="what one chip costs for an hour: 4.2 or '4.20 USD'",
    )
    parser.add_argument(
        "--option",
        metavar="NAME=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="options of the compiler, such as xla_tpu_scoped_vmem_limit_kib=65536",
    )
    _add_results(parser)


def _add_results(parser: argparse.ArgumentParser) -> None:
    """What is done with the reports."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="keep the report as JSON; a folder for several; - for standard output",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page that shows all reports")
    parser.add_argument(
        "--all", action="store_true", help="show every value, not the largest alone"
    )
    parser.add_argument(
        "--budget",
        metavar="KEY=VALUE",
        nargs="+",
        action="extend",
        default=[],
        help="limits to keep, such as hbm=90%% all_gather_bytes=2GB time=2s mfu=40%%",
    )
    parser.add_argument(
        "--compare",
        action="store_true",
        help="show what changed from the first report to the second",
    )
    parser.add_argument(
        "--schema", action="store_true", help="print the JSON Schema of a report, and end"
    )
