"""``xlashard preflight --shardings auto``: choose layout, mesh, batch and remat policy."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from xlashard._jax.trace.jitted import inner_stage
from xlashard.auto.auto_shard import auto_shard
from xlashard.auto.layout_report import LayoutReport
from xlashard.auto.sweep_layouts import try_layouts
from xlashard.cli.commands import sweep
from xlashard.cli.commands.option_words import preflight_options, read_mesh
from xlashard.cli.commands.result_files import check_outputs, print_reports, refuse, write_results
from xlashard.cli.commands.status_line import status_line
from xlashard.cli.commands.targets import (
    check_budget,
    find_program,
    read_calibration_files,
    topologies_for,
)
from xlashard.errors import ArgumentError
from xlashard.predict.preflight.preflight_run import preflight
from xlashard.predict.preflight.report.comparison import read_budget
from xlashard.predict.preflight.target_loading import TargetProgram, check_target, user_code_errors
from xlashard.predict.sweep.axis_ranges import factorisations, parse_axes, read_axes
from xlashard.predict.sweep.evaluate import SweepRequest, evaluate_mesh
from xlashard.predict.sweep.sweep_report import SweepReport
from xlashard.predict.sweep.sweep_results import SweepResult, ranked
from xlashard.predict.sweep.sweep_run import Sweep, SweepRunner, make_request
from xlashard.predict.targets.base_topology import BaseTopology
from xlashard.predict.targets.mesh_layout import resolve_axis_sizes
from xlashard.train.config.settings import REMAT_POLICIES, load_settings

_RUNNER = "xlashard.cli.commands.automatic_layouts:try_target"
_SECONDS = 60.0
"""Time limit of all searches, and of that for the program that was chosen."""
_LEAST_SECONDS = 1.0
_MEMORY = 0.9
_PROVEN = 3
"""Number of candidates to compile."""
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
    program, tried = choose_program(arguments, target, place)
    with (
        status_line(f"choosing a layout of {target} on {place}"),
        user_code_errors(f"{target} can't be traced"),
    ):
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
    write_results(arguments, json=layouts.to_json, html=layouts.to_html, trace=report.to_trace)
    return 0 if check_budget(report, limits, named=False) else 1


def _checked(arguments: argparse.Namespace) -> tuple[str, BaseTopology]:
    """Return the program and the topology.

    Raises:
        ArgumentError: If there are others than one of each, or options of other reports.
    """
    if not arguments.shardings:
        reason = "is chosen together with the layout: write --shardings auto, too"
        refuse(arguments, ["batch", "remat"], reason)
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
    if not target.endswith(".toml"):
        reason = f"is a setting of training runs, which {target} has not"
        instead = "write it with a settings file, such as configs/tiny.toml"
        refuse(arguments, ["batch", "remat"], f"{reason}: {instead}")
    places = topologies_for(target, arguments.topology, arguments.slices, arguments.set)
    if len(places) > 1:
        raise ArgumentError(
            f"--shardings auto takes one topology, and --topology {arguments.topology} names "
            f"{len(places)}: write --topology {places[0].name}"
        )
    (place,) = places
    if not (sweep.is_sweep(arguments) or arguments.batch or arguments.remat):
        sweep.check_no_sweep(arguments)
    return target, place


def _find_program(
    target: str, place: BaseTopology, axes: Mapping[str, int] | None, words: Sequence[str]
) -> TargetProgram:
    """Return the program whose layout is left open."""
    words = (*words, "sharding=auto") if target.endswith(".toml") else words
    program = find_program(target, place, axes, words)
    if inner_stage(program.function) is not None:
        raise ArgumentError(
            f"{target} returned a {type(program.function).__name__}, which has its layout: return "
            "the function and its arguments"
        )
    return program


def try_target(values: Mapping[str, Any]) -> dict[str, Any]:
    """Try the layouts of a candidate, in a process of a sweep."""
    return evaluate_mesh(SweepRequest.from_json(values), _make_candidate, try_layouts)


def _make_candidate(request: SweepRequest, place: BaseTopology) -> TargetProgram:
    words = (*sweep.checked_settings(request.target), *choice_words(request))
    return _find_program(request.target["name"], place, request.axes, words)


def choose_program(
    arguments: argparse.Namespace, target: str, place: BaseTopology
) -> tuple[TargetProgram, SweepReport | None]:
    """Choose mesh, batch and remat policy of a program.

    Args:
        arguments: The words of `xlashard preflight`, parsed.
        target: The program.
        place: The topology.

    Returns:
        The program, and what was tried; None without a choice.

    Raises:
        XlashardError: If the words are wrong, or the program is possible on none of the meshes.
    """
    batches, policies = [None], [""]
    if arguments.batch or arguments.remat:
        batches, policies = training_choices(
            target, arguments.set, arguments.batch, arguments.remat
        )
    meshes = _meshes(arguments, target, place)
    pairs = [(batch, remat) for batch in batches for remat in policies]
    if len(meshes) * len(pairs) == 1:
        return _find_program(target, place, meshes[0], arguments.set), None
    plain = sweep.describe_sweep(arguments, target, (place,))
    seconds = max(_SECONDS / (len(meshes) + len(pairs)), _LEAST_SECONDS)
    limits = {"memory": _MEMORY, "seconds": seconds, "is_proven": False}
    candidates = replace(plain, target={**plain.target, **limits}, runner=_RUNNER)
    requests = [
        replace(make_request(candidates, place, axes or {}), batch=batches[0], remat=policies[0])
        for axes in meshes
    ]
    with sweep.open_runner(arguments, target) as runner:
        best = runner.run(candidates, requests)[0]
        if best.facts is None:
            raise ArgumentError(f"{target} is possible on none of the meshes: {best.reason}")
        # Other batches and remat policies are tried on the most promising mesh.
        requests += [
            replace(requests[0], mesh=best.mesh, batch=batch, remat=remat)
            for batch, remat in pairs[1:]
        ]
        results = _prove(runner, candidates, requests)
    program = _find_program(
        target, place, dict(results[0].mesh), (*arguments.set, *choice_words(results[0]))
    )
    return program, SweepReport(target, str(runner.folder), results, runner.reused_results)


def _prove(
    runner: SweepRunner, candidates: Sweep, requests: Sequence[SweepRequest]
) -> tuple[SweepResult, ...]:
    """Compile the most promising candidates; while none of them fits, the next ones.

    Args:
        runner: Runner of the candidates.
        candidates: Specification of the sweep.
        requests: All candidates, whose predictions the folder of the runner has.

    Returns:
        The results of all, best first.
    """

    def choice(each: SweepRequest | SweepResult) -> tuple[Any, ...]:
        return each.mesh, each.batch, each.remat

    predicted = runner.run(candidates, requests)
    results = {choice(result): result for result in predicted}
    by_choice = {choice(request): request for request in requests}
    possible = [by_choice[choice(r)] for r in predicted if r.facts is not None]
    while possible and not any(r.outcome == "fits" for r in results.values()):
        group, possible = possible[:_PROVEN], possible[_PROVEN:]
        proven = [replace(each, target={**each.target, "is_proven": True}) for each in group]
        results |= {choice(result): result for result in runner.run(candidates, proven)}
    return ranked(results.values())


def _meshes(
    arguments: argparse.Namespace, target: str, place: BaseTopology
) -> list[dict[str, int] | None]:
    """Return the meshes to choose from; None for that of a function."""
    if not arguments.mesh:
        own = load_settings(target, arguments.set).mesh if target.endswith(".toml") else None
        return [own and resolve_axis_sizes(own, place.num_devices, str(place))]
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


def choice_words(choice: SweepRequest | SweepResult) -> tuple[str, ...]:
    """Return the batch and the remat policy of a choice as `KEY=VALUE` words of settings.

    Args:
        choice: The choice. Its policy is `custom` for that of the settings, `none`, or a name for
            `model.remat_policy`.
    """
    batch = () if choice.batch is None else (f"training.batch={choice.batch}",)
    policy = choice.remat
    if policy in ("", _OWN_POLICY):
        return batch
    return (
        *batch,
        f"model.remat={'false' if policy == _NO_REMAT else 'true'}",
        f"model.remat_policy={_OWN_POLICY if policy == _NO_REMAT else policy}",
        "model.kept=[]",
        "model.offloaded=[]",
    )
