"""What the report depends on besides the program: chips, versions and flags."""

from collections.abc import Iterator

from xlashard.tpu.preflight.fields import PreflightFields
from xlashard.tpu.preflight.page.markup import Child, Html, join, tag, user
from xlashard.tpu.preflight.page.quantities import in_thousands
from xlashard.tpu.preflight.parts import ThroughputReport
from xlashard.wording import in_bytes, in_seconds


def environment_section(report: PreflightFields) -> Html:
    """Three lists: the chips by their data sheet, the versions, the flags."""
    lists = [
        _list("Each device", _device(report)),
        _list("Compiled with", _versions(report)),
        _list("Model", _model(report.throughput)) if report.throughput else None,
    ]
    return join(tag("div", lists, class_="lists"), _flags(report))


def _list(name: str, pairs: Iterator[tuple[str, str]]) -> Html:
    items = [[tag("dt", word), tag("dd", user(text))] for word, text in pairs]
    return tag("div", tag("h3", name), tag("dl", items))


def _device(report: PreflightFields) -> Iterator[tuple[str, str]]:
    topology = report.topology
    yield "generation", topology.generation
    for dtype, flops in topology.peak_flops:
        yield f"peak {dtype}", f"{in_thousands(flops)}{'OP' if 'int' in dtype else 'FLOP'}/s"
    yield "HBM", f"{in_bytes(topology.hbm_bytes)}, {in_bytes(topology.available_bytes)} available"
    yield "HBM bandwidth", f"{in_thousands(topology.hbm_bandwidth)}B/s"
    yield "one ICI link", f"{in_thousands(topology.ici_bandwidth)}B/s in one direction"
    yield "share of DCN", f"{in_thousands(topology.dcn_bandwidth)}B/s"


def _versions(report: PreflightFields) -> Iterator[tuple[str, str]]:
    versions = report.versions
    for name in ("xlashard", "jax", "jaxlib", "libtpu", "runtime"):
        yield name, getattr(versions, name)
    yield "partitioner", report.partitioner
    yield "compile time", in_seconds(report.compile_seconds)


def _model(throughput: ThroughputReport) -> Iterator[tuple[str, str]]:
    workload = throughput.workload
    yield "parameters", in_thousands(workload.parameters)
    if workload.active_parameters != workload.parameters:
        yield "active for a token", in_thousands(workload.active_parameters)
    yield "tokens in a step", f"{workload.tokens:,}"
    yield "model FLOP in a step", f"{in_thousands(workload.model_flops)}FLOP"


def _flags(report: PreflightFields) -> Html:
    flags = report.versions.flags
    if not flags:
        return tag("p", "No compiler flags were set.", class_="note")
    items: list[Child] = [
        tag("li", tag("b", user(place)), " ", user(text, "code")) for place, text in flags
    ]
    return join(tag("h3", "Compiler flags"), tag("ul", items, class_="flags"))
