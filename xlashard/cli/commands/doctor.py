"""``xlashard doctor``: whether xlashard works on this machine, and what to change.

It runs without JAX, which may be what is broken: `installation_probe` tries JAX in another process.
"""

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib import metadata
from typing import TYPE_CHECKING, NamedTuple

from xlashard.cli.commands.doctor_checks import PREFIXES, Check, shown
from xlashard.cli.commands.tpu_host import check_tpu_host
from xlashard.config import describe_unknown_variables, read_flags
from xlashard.errors import ConfigError
from xlashard.support.background import python_path
from xlashard.support.consoles import print_json
from xlashard.support.formatting import print_error, signal_name
from xlashard.support.lazily import deferred

if TYPE_CHECKING:
    from xlashard.cli.commands import all_hosts
else:
    # It needs JAX, which may be what is broken.
    all_hosts = deferred("xlashard.cli.commands.all_hosts")

# Seconds for the process that tries JAX.
_TIMEOUT = 180.0
_PROBE = (sys.executable, "-P", "-m", "xlashard.cli.commands.installation_probe")
STEPS = ("import xlashard", "devices", "compilation cache", "program", "program for TPUs")
"""Steps of the process that tries JAX, in this order."""

_EXTRAS = {
    "tpu": "programs for TPUs",
    "gpu-target": "programs for GPUs, compiled on a machine without a GPU",
    "train": "xlashard train, and settings files as targets",
    "legacy": "checkpoints of 2022 and xlashard legacy --migrate",
}
_PLUGIN = re.compile(r"libtpu|jax-(cuda|rocm|oneapi)\w*-(plugin|pjrt)")


def run(arguments: argparse.Namespace) -> int:
    """Run ``xlashard doctor``.

    Args:
        arguments: Parsed arguments.

    Returns:
        The exit code: 0, or 1 if a check failed.
    """
    if arguments.all_hosts:
        return all_hosts.run()
    checks = []
    for check in _checks():
        checks.append(check)
        if not arguments.json:
            print(shown(check), flush=True)
    failed = [check.subject for check in checks if check.status == "fail"]
    if arguments.json:
        document = {"ok": not failed, "checks": [check._asdict() for check in checks]}
        print_json(document)
    elif failed:
        print_error(f"to be repaired: {', '.join(failed)}")
    return 1 if failed else 0


def _checks() -> Iterator[Check]:
    system = f"{platform.system()} {platform.machine()}"
    yield Check("Python", "ok", f"{platform.python_version()}, {sys.executable}, {system}")
    installed = {_normal(each.name): each.version for each in metadata.distributions()}
    yield from check_packages(installed, _requirements)
    yield from check_extras(installed, _requirements("xlashard"))
    yield from check_environment(os.environ)
    yield from check_tpu_host(os.environ)
    yield from check_probe(*_probe(), has_libtpu="libtpu" in installed)


def _normal(name: str | None) -> str:
    return (name or "").lower().replace("_", "-")


def _requirements(name: str) -> Sequence[str]:
    try:
        return metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return ()


class _Requirement(NamedTuple):
    name: str
    versions: str
    extra: str


def _parsed(requirements: Iterable[str]) -> Iterator[_Requirement]:
    """Parse requirements such as `libtpu==0.0.50.*; extra == "tpu"`."""
    for text in requirements:
        body, _, marker = text.partition(";")
        match = re.match(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*\(?([^)]*)", body.strip())
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)""", marker)
        if match is not None:
            versions = match[2].strip()
            yield _Requirement(_normal(match[1]), versions, extra[1] if extra else "")


def meets(version: str, requirement: str) -> bool:
    """Return whether a version meets a version specifier.

    Args:
        version: A version.
        requirement: Clauses of `==`, `!=`, `<`, `<=`, `>` and `>=`; others are ignored.

    Example:
        >>> meets("0.12.0.1", ">=0.11.2,<0.13"), meets("0.0.51", "==0.0.50.*")
        (True, False)
    """
    for clause in requirement.split(","):
        match = re.fullmatch(r"\s*(==|!=|<=|>=|<|>)\s*([\w.+]+?)(\.\*)?\s*", clause)
        if match is None:
            continue
        have, want = _numbers(version), _numbers(match[2])
        have = have[: len(want)] if match[3] else have
        length = max(len(have), len(want))
        have, want = (each + (0,) * (length - len(each)) for each in (have, want))
        met = {
            "==": have == want,
            "!=": have != want,
            "<=": have <= want,
            ">=": have >= want,
            "<": have < want,
            ">": have > want,
        }
        if not met[match[1]]:
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def check_packages(
    installed: Mapping[str, str], requirements: Callable[[str], Sequence[str]]
) -> Iterator[Check]:
    """Check that the versions of xlashard, JAX, jaxlib, NumPy and JAX's plugins fit together.

    Args:
        installed: Versions by the name of the package.
        requirements: Function from the name of a package to its requirements.
    """
    plugins = sorted(filter(_PLUGIN.fullmatch, installed))
    needed = ("xlashard", "jax", "jaxlib", "numpy")
    required: dict[str, list[tuple[str, str]]] = {}
    for name in (*needed, *plugins):
        for each in _parsed(requirements(name)):
            # An extra of JAX pins a plugin, which also works if pip installed it by its own name.
            if not each.extra or _PLUGIN.fullmatch(each.name):
                required.setdefault(each.name, []).append((name, each.versions))
    for name in (*needed, *plugins):
        version = installed.get(name)
        if version is None:
            yield Check(name, "fail", "not installed", f"pip install {name}")
            continue
        broken = [
            pair for pair in dict.fromkeys(required.get(name, ())) if not meets(version, pair[1])
        ]
        if not broken:
            yield Check(name, "ok", version)
            continue
        by, versions = broken[0]
        observed = f"{version}, but {by} {installed[by]} requires {name}{versions}"
        yield Check(name, "fail", observed, f"pip install '{name}{versions}'")


def check_extras(installed: Mapping[str, str], requirements: Sequence[str]) -> Iterator[Check]:
    """Check which extras of xlashard are installed.

    Args:
        installed: Versions by the name of the package.
        requirements: The requirements of xlashard.
    """
    for extra, use in _EXTRAS.items():
        names = {each.name for each in _parsed(requirements) if each.extra == extra}
        if extra == "tpu":
            names = {"libtpu"}
        missing = sorted(names - set(installed))
        if missing:
            advice = f"for {use}: pip install 'xlashard[{extra}]'"
            yield Check(f"extra {extra}", "note", f"without {', '.join(missing)}", advice)
        else:
            yield Check(f"extra {extra}", "ok", "installed")


def check_environment(environment: Mapping[str, str]) -> Iterator[Check]:
    """Check the variables that xlashard, JAX, XLA and libtpu read.

    Args:
        environment: For example `os.environ`.
    """
    try:
        read_flags(environment)
    except ConfigError as error:
        yield Check("environment", "fail", str(error), "correct it, or unset the variable")
    for text in describe_unknown_variables(environment):
        yield Check("environment", "note", text, "correct it, or unset the variable")
    names = sorted(name for name in environment if name.startswith(PREFIXES))
    if not names:
        yield Check("environment", "ok", "no variable of xlashard, JAX, XLA or libtpu is set")
    for name in names:
        yield Check(name, "ok", environment[name])


def _probe() -> tuple[int | None, str, str]:
    """Try JAX in another process.

    Returns:
        Its exit code, None after a timeout; its output; and its errors.
    """
    try:
        done = subprocess.run(
            _PROBE,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": python_path()},
        )
    except subprocess.TimeoutExpired as error:
        return None, _decoded(error.stdout), _decoded(error.stderr)
    return done.returncode, _decoded(done.stdout), _decoded(done.stderr)


def _decoded(text: bytes | None) -> str:
    return (text or b"").decode(errors="replace")


def check_probe(code: int | None, output: str, errors: str, *, has_libtpu: bool) -> Iterator[Check]:
    """Return the checks of the process that tried JAX, with the step in which it ended.

    Args:
        code: Its exit code; None after a timeout.
        output: A check in JSON per line.
        errors: Its standard error.
        has_libtpu: Whether it compiles for TPUs.
    """
    done = set()
    for line in output.splitlines():
        if line.startswith('["'):
            check = Check(*json.loads(line))
            done.add(check.subject)
            yield check
    steps = STEPS if has_libtpu else STEPS[:-1]
    unfinished = next((step for step in steps if step not in done), None)
    if unfinished is None:
        return
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    raised = [line for line in lines if re.match(r"[\w.]+(Error|Exit|Exception)\b", line)]
    last = (raised or lines or [""])[-1]
    if code is None:
        observed = f"no answer in {_TIMEOUT:.0f} s"
        advice = "if another process uses the accelerator, end it; or write JAX_PLATFORMS=cpu"
    elif code < 0:
        observed = f"the process was ended by {signal_name(-code)}: {last}"
        advice = "install versions that fit together: pip install --upgrade xlashard jax jaxlib"
    else:
        observed = last or f"the process ended with {code}"
        advice = f"all of the error: {' '.join(_PROBE)}"
    yield Check(unfinished, "fail", observed, advice)
