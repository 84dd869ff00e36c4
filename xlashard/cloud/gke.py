"""A job on GKE: made, waited for, followed and deleted through kubectl."""

import json
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xlashard.cloud.commands import Command
from xlashard.cloud.following import Follower, Over
from xlashard.cloud.jobset import jobset
from xlashard.cloud.kubectl import Kubectl
from xlashard.cloud.logs import LogBook
from xlashard.cloud.retrying import Backoff, run_again
from xlashard.cloud.session import Session
from xlashard.cloud.settings import check_name
from xlashard.errors import CloudError, counted
from xlashard.testing.launch.supervision import collect_signals, signal_name

_TICK = 0.2
_LAST_LINES = 20
_KILLED = (137, 143)
_RESTARTS = "jobset.sigs.k8s.io/restart-attempt"


@dataclass(frozen=True)
class PodState:
    """A pod of a JobSet.

    Attributes:
        name: Of it.
        label: Which host of which slice: `1.3`.
        attempt: Of the JobSet, for which it was made.
        phase: `Pending`, `Running`, `Succeeded` or `Failed`.
        code: The exit code of its container, where it is over.
        ended: When that was, as text that sorts.
        waits_for: Why it is pending, where that is known.
    """

    name: str
    label: str
    attempt: int
    phase: str
    code: int | None
    ended: str
    waits_for: str


def manifest(session: Session) -> int:
    """Prints the JobSet, as JSON, which is YAML.

    Raises:
        CloudError: The settings are wrong.
    """
    print(json.dumps(jobset(session.settings), indent=2))
    return 0


def apply(session: Session) -> int:
    """Makes the JobSet, or brings it to what the settings say.

    Raises:
        CloudError: The settings are wrong, or kubectl fails.
    """
    command = kubectl_of(session).apply(jobset(session.settings))
    run_again(session.runner, command, session.patience).check()
    session.say(f"the JobSet {session.settings.tpu.name} is made")
    return 0


def follow(session: Session) -> int:
    """Shows and keeps what all pods write, until the JobSet is over.

    Returns:
        The exit code: 0 if it has completed. After Ctrl-C, which leaves it running, 130.

    Raises:
        CloudError: There is no such JobSet, its pods did not start in time, or kubectl fails.
    """
    if session.runner.dry:
        kubectl = kubectl_of(session)
        session.runner.run(kubectl.get())
        session.runner.run(kubectl.pods())
        return 0
    return _Watch(session).to_end()


def delete(session: Session) -> int:
    """Deletes the JobSet with its pods; one that is not there is no error.

    Raises:
        CloudError: kubectl fails.
    """
    run_again(session.runner, kubectl_of(session).delete(), session.patience).check()
    session.say(f"the JobSet {session.settings.tpu.name} is gone")
    return 0


def run(session: Session) -> int:
    """Makes the JobSet, follows it to its end, and deletes it unless `--keep`.

    Returns:
        The exit code: 0 if it has completed.

    Raises:
        CloudError: The settings are wrong, its pods did not start in time, or kubectl fails.
    """
    apply(session)
    code = follow(session)
    if not session.settings.watch.keep:
        delete(session)
    return code


_VERBS = {"manifest": manifest, "run": run, "apply": apply, "follow": follow, "delete": delete}


def do(session: Session, words: Sequence[str]) -> int:
    """Does what the first word says.

    Raises:
        CloudError: There is no such thing to do, or what is done fails.
    """
    if len(words) != 1 or words[0] not in _VERBS:
        said = " ".join(words) or "nothing"
        raise CloudError(
            f"gke.py does one of {', '.join(_VERBS)}, not {said!r}. Write, for example:\n"
            "  python tpu_scripts/gke.py run --config=job.toml",
            code=2,
        )
    return _VERBS[words[0]](session)


def kubectl_of(session: Session) -> Kubectl:
    """Writes the commands for this JobSet.

    Raises:
        CloudError: It has no name, or a wrong one.
    """
    check_name(session.settings.tpu.name)
    return Kubectl(session.settings.tpu.name, session.settings.gke)


def read_pods(text: str) -> tuple[PodState, ...]:
    """The pods of a JobSet, as kubectl tells them."""
    return tuple(_pod(item) for item in json.loads(text or "{}").get("items", ()))


def _pod(item: Mapping[str, Any]) -> PodState:
    about, status = item["metadata"], item.get("status", {})
    labels = about.get("labels", {})
    slice_, host = (
        labels.get("jobset.sigs.k8s.io/job-index", "0"),
        labels.get("batch.kubernetes.io/job-completion-index", "0"),
    )
    containers = status.get("containerStatuses", [{}])
    ended = containers[0].get("state", {}).get("terminated", {}) if containers else {}
    waiting = containers[0].get("state", {}).get("waiting", {}) if containers else {}
    conditions = [each.get("message", "") for each in status.get("conditions", ())]
    return PodState(
        about["name"],
        f"{slice_}.{host}",
        int(labels.get(_RESTARTS, "0")),
        status.get("phase", "Pending"),
        ended.get("exitCode"),
        ended.get("finishedAt", ""),
        waiting.get("reason", "") or next(filter(None, conditions), ""),
    )


def end_of(about: Mapping[str, Any]) -> str:
    """How a JobSet ended: `Completed` or `Failed`; empty while it runs."""
    for condition in about.get("status", {}).get("conditions", ()):
        if condition.get("status") == "True" and condition.get("type") in ("Completed", "Failed"):
            return condition["type"]
    return ""


class _PodStream:
    """What a pod writes. kubectl begins at the beginning each time."""

    def __init__(self, kubectl: Kubectl, pod: PodState) -> None:
        self.seen = 0
        self._kubectl, self._pod = kubectl, pod
        self._skip = 0

    def command(self) -> Command:
        """What sends it."""
        self._skip = self.seen
        return self._kubectl.logs(self._pod.name)

    def feed(self, chunk: bytes) -> bytes:
        """Takes what kubectl wrote, and gives what was not there before."""
        new = chunk[self._skip :]
        self._skip = max(0, self._skip - len(chunk))
        self.seen += len(new)
        return new

    def over(self, code: int) -> Over | None:
        """Once the container has ended, kubectl ends well; with which code, the pod tells."""
        return Over(self._pod.label, 0) if code == 0 else None


class _Watch:
    """Follows all pods of a JobSet, those of later attempts too, until it is over."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kubectl = kubectl_of(session)
        self._ends: queue.Queue[Over] = queue.Queue()
        self._followers: dict[str, Follower] = {}
        self._failed: dict[str, PodState] = {}
        self._attempt = -1

    def to_end(self) -> int:
        session, name = self._session, self._session.settings.tpu.name
        slices = session.settings.tpu.slices
        hosts = session.accelerator.hosts
        labels = [f"{number}.{host}" for number in range(slices) for host in range(hosts)]
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
        book = LogBook(Path(session.settings.run.logs) / name / stamp, labels)
        session.say(f"following {counted(len(labels), 'pod')}; logs in {book.folder}")
        try:
            with collect_signals() as signals:
                end = self._look_until(book, signals)
        finally:
            for follower in self._followers.values():
                follower.cancel()
            for follower in self._followers.values():
                follower.join()
            book.close()
        if signals:
            session.say(
                f"{signal_name(signals[0])}: the JobSet {name} goes on without being followed; "
                f"delete it with\n  python tpu_scripts/gke.py delete --name={name}"
            )
            return 128 + signals[0]
        session.say(f"the JobSet {name} has {end.lower()}; logs in {book.folder}")
        if end == "Completed":
            return 0
        return self._tell_failure(book)

    def _look_until(self, book: LogBook, signals: Sequence[int]) -> str:
        clock, wait = self._session.clock, self._session.settings.wait
        started = clock.now()
        while True:
            end = self._end()
            pods = self._pods()
            self._follow_new(pods, book)
            if end:
                self._finish(clock.now() + 10.0)
                return end
            self._check_started(pods, clock.now() - started)
            due = clock.now() + wait.poll
            while clock.now() < due:
                if signals:
                    return ""
                clock.sleep(min(_TICK, wait.poll))

    def _end(self) -> str:
        told = run_again(self._session.runner, self._kubectl.get(), self._session.patience).check()
        if not told.strip():
            raise CloudError(  # no-catalogue: needs a cloud
                f"there is no JobSet {self._kubectl.name} in the namespace "
                f"{self._session.settings.gke.namespace}; make it with\n"
                f"  python tpu_scripts/gke.py apply --name={self._kubectl.name} ..."
            )
        return end_of(json.loads(told))

    def _pods(self) -> tuple[PodState, ...]:
        command = self._kubectl.pods()
        return read_pods(run_again(self._session.runner, command, self._session.patience).check())

    def _follow_new(self, pods: Sequence[PodState], book: LogBook) -> None:
        wait = self._session.settings.wait
        newest = max((pod.attempt for pod in pods), default=0)
        if newest > max(self._attempt, 0):
            self._session.say(f"the JobSet has started anew (restart {newest})")
        self._attempt = max(self._attempt, newest)
        for pod in pods:
            if pod.phase == "Failed":
                self._failed.setdefault(pod.name, pod)
            if pod.phase == "Pending" or pod.name in self._followers:
                continue
            follower = Follower(
                pod.label,
                _PodStream(self._kubectl, pod),
                lambda text, label=pod.label: book.write(label, text),
                self._ends,
                self._session.runner,
                Backoff(wait.ssh_wait, tries=wait.ssh_tries),
            )
            self._followers[pod.name] = follower
            follower.start()

    def _check_started(self, pods: Sequence[PodState], waited: float) -> None:
        limit = self._session.settings.wait.ready_within
        if self._followers or waited < limit:
            return
        why = next((pod.waits_for for pod in pods if pod.waits_for), "nobody says why")
        raise CloudError(  # no-catalogue: needs a cloud
            f"after {waited:.0f} s no pod of {self._kubectl.name} has started: {why}. Look at\n"
            f"  kubectl describe jobset {self._kubectl.name}\n"
            f"or wait longer with --ready_within={2 * limit:g}"
        )

    def _finish(self, deadline: float) -> None:
        """Lets the followers come to the ends of the logs."""
        clock = self._session.clock
        done = 0
        while done < len(self._followers) and clock.now() < deadline:
            try:
                self._ends.get(timeout=_TICK)
                done += 1
            except queue.Empty:
                continue

    def _tell_failure(self, book: LogBook) -> int:
        last = [pod for pod in self._failed.values() if pod.attempt == self._attempt]
        # Those that were killed then were so because of the first.
        last.sort(key=lambda pod: (pod.ended, pod.code in _KILLED))
        if not last:
            return 1
        first = last[0]
        lines = book.last_lines(first.label, _LAST_LINES) or "[it wrote nothing]"
        self._session.say(
            f"pod {first.name} failed: exit code {first.code}\n"
            f"--- pod {first.label}, the end of {book.path(first.label)} ---\n{lines}"
        )
        return first.code or 1
