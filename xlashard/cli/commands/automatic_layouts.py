"""``xlashard preflight --shardings auto``: choose layout, mesh, batch and remat policy."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from xlashard._jax.trace.jitted import inner_stage
from xlashard.auto.auto_program import AutoProgram, read_program
from xlashard.auto.auto_shard import auto_shard
from xlashard.auto.choices import LayoutChoice, LayoutReport, TriedLayout, predict, prove
from xlashard.cli.commands import sweep
from xlashard.cli.commands.common import (
    check_budget,
    find_program,
    preflight_options,
    read_calibration_files,
    read_mesh,
    status_line,
    topologies_for,
)
from xlashard.cli.commands.result_files import check_outputs, print_reports, write
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.preflight_run import preflight
from xlashard.predict.preflight.report.comparison import read_budget
from xlashard.predict.preflight.report.measured import Calibration
from xlashard.predict.preflight.target_loading import TargetProgram, check_target, user_code_errors
from xlashard.predict.sweep.axis_ranges import factorisations, parse_axes, read_axes
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.train.config.settings import REMAT_POLICIES, load_settings

_SECONDS = 60.0
"""Time limit of all searches, and of that for the program that was chosen."""
_LEAST_SECONDS = 1.0
_MEMORY = 0.9
_AXES = {"data": "auto", "model": "..32"}
_AUTO = "auto"
_OWN_POLICY, _NO_REMAT = "custom", "none"
_POLICIES = (_OWN_POLICY, _NO_REMAT, "minimal_with_context", "full")


def run(arguments: argparse.Namespace) -> int:
    """Choose a layout, and report the program with it.

    Args:
        arguments: The words of `xlashard preflight`, parsed.

    Returns:
        The exit code: 0 if the program fits and meets its budget, 1 if not.

    Raises:
        XlashardError: If the words are wrong.
    """
    target, place = _checked(arguments)
    limits = read_budget(arguments.budget)
    options = preflight_options(arguments)
    rates = read_calibration_files(arguments.rates, [place]).get(place.chip.name)
    with status_line(f"choosing a layout of {target} on {place}"):
        program, tried = _chosen(arguments, target, place, rates)
        with user_code_errors(f"{target} can't be traced"):
            plan = auto_shard(
                program.function,
                *program.args,
                mesh=program.mesh,
                topology=place,
                memory=_MEMORY,
                rates=rates,
                **program.kwargs,
            )
    with status_line(f"compiling {target} for {place}"):
        report = preflight(
            plan.lower_program(),
            topology=place,
            workload=program.workload,
            rates=rates,
            title=target,
            **options,
        )
    layouts = LayoutReport(target, tried, plan, report)
    print_reports(arguments, [layouts])
    for path, text in (
        (arguments.json, layouts.to_json),
        (arguments.html, layouts.to_html),
        (arguments.trace, report.to_trace),
    ):
        if path:
            write(path, text())
    return 0 if check_budget(report, limits, named=False) else 1


def _checked(arguments: argparse.Namespace) -> tuple[str, BaseTopology]:
    """Return the program and the topology.

    Raises:
        ArgumentError: If there are others than one of each, or options of other reports.
    """
    for name in ("batch", "remat"):
        if getattr(arguments, name) and not arguments.shardings:
            raise ArgumentError(
                f"--{name} {getattr(arguments, name)} is chosen together with the layout: write "
                "--shardings auto, too"
            )
    if arguments.script:
        raise ArgumentError(
            "--shardings auto chooses before a program runs, and a script after -- places its own "
            "arrays: write package.module:function, or xlashard.auto_shard in the script"
        )
    for name in ("compare", "markdown", "measured", "calibrate"):
        if getattr(arguments, name):
            raise ArgumentError(
                f"--{name} is not for --shardings auto: write --json auto.json, then xlashard "
                f"preflight --{name} with auto.json"
            )
    sweep.check_no_sweep(arguments)
    check_outputs(arguments)
    if len(arguments.targets) != 1:
        raise ArgumentError(
            f"--shardings auto takes one program, and here are {len(arguments.targets)}: write "
            "xlashard preflight --shardings auto CONFIG.toml, or package.module:function"
        )
    (target,) = arguments.targets
    if target.endswith(".json"):
        raise ArgumentError(
            f"{target} is a report of a program that has its layout: write the settings file or "
            "package.module:function that it is of"
        )
    check_target(target)
    for name in ("batch", "remat"):
        if getattr(arguments, name) and not target.endswith(".toml"):
            raise ArgumentError(
                f"--{name} {getattr(arguments, name)} is a setting of training runs, which "
                f"{target} has not: write it with a settings file, such as configs/tiny.toml"
            )
    places = topologies_for(target, arguments.topology, arguments.slices, arguments.set)
    if len(places) > 1:
        raise ArgumentError(
            f"--shardings auto takes one topology, and --topology {arguments.topology} names "
            f"{len(places)}: write --topology {places[0].name}"
        )
    (place,) = places
    return target, place


@dataclass(frozen=True)
class _LayoutSource:
    """Program by its settings.

    Attributes:
        target: Settings file, or `package.module:function`.
        place: The topology.
        words: Words of `--set`.
        rates: Measured slowdowns of the chip; None for the published rates.
    """

    target: str
    place: BaseTopology
    words: tuple[str, ...]
    rates: Calibration | None

    def program(self, axes: Mapping[str, int] | None, words: Sequence[str] = ()) -> TargetProgram:
        """Return the program on a mesh, with further settings."""
        program = find_program(self.target, self.place, axes, (*self.words, *words))
        if inner_stage(program.function) is not None:
            raise ArgumentError(
                f"{self.target} returned a {type(program.function).__name__}, which has its "
                "layout: return the function and its arguments"
            )
        return program

    def choice(
        self, axes: Mapping[str, int] | None, batch: int | None = None, remat: str = ""
    ) -> LayoutChoice:
        """Return a choice of mesh, batch and remat policy."""
        words = self.choice_words(batch, remat)
        sizes = tuple(axes.items()) if axes else ()
        return LayoutChoice(sizes, partial(self.read, axes, words), batch, remat)

    def choice_words(self, batch: int | None, remat: str) -> tuple[str, ...]:
        """Return the settings of a choice."""
        own = () if batch is None else (f"training.batch={batch}",)
        return (*own, *(remat_words(remat) if remat else ()))

    def read(
        self, axes: Mapping[str, int] | None, words: Sequence[str]
    ) -> tuple[AutoProgram, int | None]:
        """Return the traced program, and the tokens of a step."""
        program = self.program(axes, words)
        on, work = program.mesh or axes, program.workload
        with user_code_errors(f"{self.target} can't be traced"):
            traced = read_program(program.function, program.args, program.kwargs, on, self.place)
        return traced.with_rates(self.rates), None if work is None else work.tokens


def _chosen(
    arguments: argparse.Namespace, target: str, place: BaseTopology, rates: Calibration | None
) -> tuple[TargetProgram, tuple[TriedLayout, ...]]:
    """Return the program with the mesh and the settings that were chosen, and what was tried."""
    of_settings = target.endswith(".toml")
    words = (*arguments.set, "sharding=auto") if of_settings else tuple(arguments.set)
    source = _LayoutSource(target, place, words, rates)
    meshes = _meshes(arguments, place)
    batches, policies = [None], [""]
    if arguments.batch or arguments.remat:
        batches, policies = training_choices(
            target, arguments.set, arguments.batch, arguments.remat
        )
    if len(meshes) * len(batches) * len(policies) == 1:
        return source.program(meshes[0]), ()
    limit = max(_SECONDS / (len(meshes) + len(batches) * len(policies)), _LEAST_SECONDS)
    first = [source.choice(axes, batches[0], policies[0]) for axes in meshes]
    predicted = predict(first, _MEMORY, limit)
    if predicted[0].program is None:
        raise ArgumentError(
            f"{target} is possible on none of the meshes: {predicted[0].tried.reason}"
        )
    # Other batches and remat policies are tried on the most promising mesh.
    axes = dict(predicted[0].choice.mesh) or None
    pairs = [(batch, remat) for batch in batches for remat in policies]
    more = predict((source.choice(axes, *pair) for pair in pairs[1:]), _MEMORY, limit)
    predicted = sorted([*predicted, *more], key=lambda p: p.rank)
    best, tried = prove(predicted)
    choice = best.choice
    chosen = source.choice_words(choice.batch, choice.remat)
    return source.program(dict(choice.mesh) or None, chosen), tuple(tried)


def _meshes(arguments: argparse.Namespace, place: BaseTopology) -> list[dict[str, int] | None]:
    """Return the meshes to choose from; None for that of the program."""
    if not arguments.mesh:
        return [None]
    if not sweep.is_sweep(arguments):
        return [read_mesh(arguments.mesh)]
    axes = read_axes(_AXES) if arguments.mesh.strip() == _AUTO else parse_axes(arguments.mesh)
    meshes = factorisations(place.num_devices, axes)
    # An axis of size 1 shards nothing, and the same mesh under another name is another choice.
    return [dict(sizes) for sizes in _distinct(meshes)]


def _distinct(meshes: Sequence[Mapping[str, int]]) -> Iterator[Mapping[str, int]]:
    """Yield meshes of different sizes: a search gives the axes their parts."""
    seen: set[tuple[int, ...]] = set()
    for mesh in meshes:
        sizes = tuple(sorted(mesh.values()))
        if sizes not in seen:
            seen.add(sizes)
            yield mesh


def training_choices(
    path: str, words: Sequence[str], batch: str, remat: str
) -> tuple[list[int | None], list[str]]:
    """Return the batches and remat policies to choose from, those of the settings first.

    Args:
        path: A TOML file.
        words: `KEY=VALUE` words that override the file.
        batch: `auto`, or batches such as `32,64`; empty for that of the settings.
        remat: `auto`, or policies such as `none,full`; empty for that of the settings.

    Raises:
        ArgumentError: If a word names no batch, or no policy.
    """
    training = load_settings(path, words).training
    own, least = training.batch, training.accumulate
    if batch in ("", "auto"):
        factors = (1, 0.5, 2, 4) if batch else (1,)
        batches = [round(own * factor) for factor in factors if own * factor % least == 0]
    else:
        batches = [_batch_size(word, batch) for word in batch.split(",")]
    known = (_OWN_POLICY, _NO_REMAT, *REMAT_POLICIES)
    policies = (remat or _OWN_POLICY).split(",") if remat != "auto" else list(_POLICIES)
    unknown = next((policy for policy in policies if policy not in known), None)
    if unknown is not None:
        raise ArgumentError(
            f"--remat {remat} names {unknown!r}, which is no policy: write --remat auto, or some "
            f"of {','.join(known)}"
        )
    return list(dict.fromkeys(batches)), list(dict.fromkeys(policies))


def _batch_size(word: str, words: str) -> int:
    if word.strip().isascii() and word.strip().isdecimal() and int(word):
        return int(word)
    raise ArgumentError(
        f"--batch {words} is invalid ({word.strip()!r}): write --batch auto, or numbers of "
        "sequences such as --batch 32,64"
    )


def remat_words(policy: str) -> tuple[str, ...]:
    """Return the settings of a remat policy, as `KEY=VALUE` words.

    Args:
        policy: `custom` for that of the settings, `none`, or a name for `model.remat_policy`.
    """
    if policy == _OWN_POLICY:
        return ()
    named = "custom" if policy == _NO_REMAT else policy
    remat = "false" if policy == _NO_REMAT else "true"
    return (
        f"model.remat={remat}",
        f"model.remat_policy={named}",
        "model.kept=[]",
        "model.offloaded=[]",
    )
