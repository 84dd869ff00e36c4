"""What the doctor finds on workers, and what to do about it: judged here, looked for there."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from xlashard.errors import counted
from xlashard.wording import in_bytes

_LEAST_DISK = 5 * 1024**3
_LEAST_LOCKED = 64 * 1024**3
_INSTALL = "install what jax asks for: pip install --upgrade 'jax[tpu]', or setup.py anew"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        worker: Its label; empty if it is of all together.
        what: Was looked at.
        ok: Whether it is as it should be; None if it may be a nuisance.
        seen: What was seen.
        advice: What to do about it, unless it is well.
    """

    worker: str
    what: str
    ok: bool | None
    seen: str
    advice: str = ""


def findings_of(worker: str, look: Mapping[str, Any], chips: int | None) -> list[Finding]:
    """What a look at one worker says.

    Args:
        worker: Its label.
        look: What `probe.py look` wrote there.
        chips: That it should have; None if that is not known.
    """
    return [
        _chips(worker, look["chips"], chips),
        _holders(worker, look["holders"], look["unseen"]),
        _lock(worker, look["lock"], look["holders"]),
        _versions(worker, look["versions"]),
        *_memory(worker, look["memory"]),
    ]


def _chips(worker: str, found: Sequence[str], wanted: int | None) -> Finding:
    seen = f"{counted(len(found), 'chip')}" + (f" ({found[0]} ...)" if found else "")
    if not found:
        advice = "there is no TPU here, or its driver is not loaded: make the VM again (watch.py)"
        return Finding(worker, "TPU", False, "no /dev/accel* and no /dev/vfio/*", advice)
    if wanted is not None and len(found) != wanted:
        advice = "a chip or its driver is broken: make the VM again"
        return Finding(worker, "TPU", False, f"{seen}, of {wanted}", advice)
    return Finding(worker, "TPU", True, seen)


def _holders(worker: str, found: Sequence[Mapping[str, Any]], unseen: int) -> Finding:
    if found:
        seen = "; ".join(f"process {each['pid']}: {each['command'] or '?'}" for each in found)
        pids = " ".join(str(each["pid"]) for each in found)
        own = all(each["own"] for each in found)
        how = f"kill {pids}" if own else f"sudo kill {pids}"
        advice = f"let the job end, or end it: {how} (or run.py --take)"
        return Finding(worker, "held by", False, seen, advice)
    if unseen:
        seen = f"nobody, but {counted(unseen, 'process', 'processes')} of others can't be seen"
        return Finding(worker, "held by", True, seen)
    return Finding(worker, "held by", True, "nobody")


def _lock(
    worker: str, lock: Mapping[str, Any] | None, holders: Sequence[Mapping[str, Any]]
) -> Finding:
    if lock is None:
        return Finding(worker, "libtpu's lock", True, "none")
    if lock["opened"] or holders:
        return Finding(worker, "libtpu's lock", True, "of who holds the TPU")
    seen = "/tmp/libtpu_lockfile is left, and nobody holds the TPU"
    if lock["own"]:
        return Finding(worker, "libtpu's lock", True, seen)
    advice = "it is another user's: sudo rm /tmp/libtpu_lockfile"
    return Finding(worker, "libtpu's lock", False, seen, advice)


def _versions(worker: str, told: Mapping[str, Any]) -> Finding:
    if told["problem"]:
        return Finding(worker, "versions", False, told["problem"], "set it up: setup.py")
    found, wanted = told["found"], told["wanted"]
    seen = ", ".join(f"{name} {version}" for name, version in found.items() if version)
    missing = [name for name in ("jax", "jaxlib", "libtpu") if not found.get(name)]
    if missing:
        text = f"{seen}; no {', no '.join(missing)}"
        return Finding(worker, "versions", False, text, "set it up: setup.py")
    wrong = [
        f"{name} {found[name]}, but jax {found['jax']} asks for {rule}"
        for name, rule in wanted.items()
        if found.get(name) and not satisfies(found[name], rule)
    ]
    if wrong:
        return Finding(worker, "versions", False, "; ".join(wrong), _INSTALL)
    return Finding(worker, "versions", True, seen)


def _memory(worker: str, told: Mapping[str, Any]) -> Iterable[Finding]:
    total, free = told["total"], told["available"]
    if total and free is not None:
        ok = True if free > 0.2 * total else None
        seen = f"{in_bytes(free)} of {in_bytes(total)} free"
        yield Finding(
            worker, "memory", ok, seen, "" if ok else "see who has it: ps aux --sort=-rss"
        )
    locked = told["locked"]
    if locked is not None and 0 <= locked < _LEAST_LOCKED:
        seen = f"a process may lock {in_bytes(locked)}"
        advice = "transfers may fail: raise it, ulimit -l unlimited, or memlock in limits.conf"
        yield Finding(worker, "locked memory", None, seen, advice)
    pages = told["hugepages"]
    if pages not in (None, "always"):
        advice = (
            "transfers are faster with them: "
            "sudo sh -c 'echo always > /sys/kernel/mm/transparent_hugepage/enabled'"
        )
        yield Finding(worker, "huge pages", None, f"transparent_hugepage is {pages}", advice)
    disk = told["disk"]
    if disk < _LEAST_DISK:
        yield Finding(worker, "disk", None, f"{in_bytes(disk)} free", "remove what is not needed")


def compare_versions(looks: Mapping[str, Mapping[str, Any]]) -> Finding:
    """Whether all workers have the same versions."""
    by_text: dict[str, list[str]] = {}
    for worker, look in looks.items():
        found = look["versions"]["found"]
        text = ", ".join(f"{name} {version}" for name, version in found.items())
        by_text.setdefault(text, []).append(worker)
    if len(by_text) == 1:
        return Finding("", "same versions", True, f"on {counted(len(looks), 'worker')}")
    seen = "; ".join(f"{text} on {', '.join(workers)}" for text, workers in by_text.items())
    return Finding("", "same versions", False, seen, "set all of them up anew: setup.py")


def judge_reach(worker: str, to: str, told: Mapping[str, Any]) -> Finding:
    """Whether a worker reaches the coordinator."""
    if told["reached"]:
        return Finding(worker, "coordinator", True, f"{to} in {1000 * told['seconds']:.0f} ms")
    advice = "a firewall is in the way: allow traffic inside the network (default-allow-internal)"
    return Finding(worker, "coordinator", False, f"{to}: {told['problem']}", advice)


def judge_chips(
    told: Mapping[str, Mapping[str, Any] | None], workers: int, devices: int | None
) -> Finding:
    """Whether all workers see all chips.

    Args:
        told: By worker what `chips.py` wrote there; None if it did not come to that.
        workers: How many processes there should be.
        devices: How many devices there should be; None if that is not known.
    """
    what = "all chips"
    silent = [worker for worker, about in told.items() if about is None]
    if silent:
        seen = f"the program that counts them did not end on {', '.join(silent)}"
        return Finding(
            "", what, False, seen, "read its output above; a TPU that is held, a version"
        )
    abouts = {worker: about for worker, about in told.items() if about}
    counts = {worker: (each["processes"], each["devices"]) for worker, each in abouts.items()}
    seen = "; ".join(
        f"{processes} processes, {found} devices on {worker}"
        for worker, (processes, found) in counts.items()
    )
    alike = len(set(counts.values())) == 1
    processes, found = next(iter(counts.values()))
    summed = all(each["summed"] == found for each in abouts.values())
    if alike and processes == workers and devices in (None, found) and summed:
        return Finding(
            "", what, True, f"{found} devices, of {counted(processes, 'process', 'processes')}"
        )
    wanted = f"; there should be {workers} processes" + (f", {devices} devices" if devices else "")
    return Finding("", what, False, seen + wanted, "make the TPU again: a host is not part of it")


def satisfies(version: str, rule: str) -> bool:
    """Whether a version is one that a requirement allows.

    Example:
        >>> satisfies("0.0.50.1", "==0.0.50.*"), satisfies("0.11.1", "<=0.12,>=0.11.2")
        (True, False)
    """
    return all(_meets(version, part.strip()) for part in rule.split(",") if part.strip())


def _meets(version: str, rule: str) -> bool:
    match = re.match(r"(==|>=|<=|!=|<|>|~=)\s*([0-9.]+?)(\.\*)?$", rule)
    if match is None:
        return True
    sign, wanted, star = match.groups()
    have, want = _numbers(version), _numbers(wanted)
    if star:
        same = have[: len(want)] == want
        return same if sign == "==" else not same
    width = max(len(have), len(want))
    have, want = (each + [0] * (width - len(each)) for each in (have, want))
    if sign == "~=":
        fixed = len(_numbers(wanted)) - 1
        return have >= want and have[:fixed] == want[:fixed]
    return {
        "==": have == want,
        "!=": have != want,
        ">=": have >= want,
        "<=": have <= want,
        "<": have < want,
        ">": have > want,
    }[sign]


def _numbers(version: str) -> list[int]:
    """The release of a version: what follows its numbers counts for nothing."""
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return [int(part) for part in match[0].split(".")] if match else []
