"""The commands of kubectl that make, look at, follow and delete a JobSet."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from xlashard.cloud.commands import Command
from xlashard.cloud.settings import GkeSettings


@dataclass(frozen=True)
class Kubectl:
    """Writes commands for one JobSet.

    Attributes:
        name: Of the JobSet.
        gke: Where it is.
    """

    name: str
    gke: GkeSettings

    @property
    def _kubectl(self) -> tuple[str, ...]:
        context = (f"--context={self.gke.context}",) if self.gke.context else ()
        return ("kubectl", *context, f"--namespace={self.gke.namespace}")

    def apply(self, manifest: Mapping[str, Any]) -> Command:
        """Makes it."""
        words = (*self._kubectl, "apply", "--filename=-")
        return Command(words, f"make the JobSet {self.name}", json.dumps(manifest, indent=2))

    def get(self) -> Command:
        """It, as JSON; nothing if there is none."""
        words = (*self._kubectl, "get", "jobsets", self.name, "--ignore-not-found", "--output=json")
        return Command(words, f"look at the JobSet {self.name}")

    def pods(self) -> Command:
        """Its pods, as JSON."""
        label = f"--selector=jobset.sigs.k8s.io/jobset-name={self.name}"
        words = (*self._kubectl, "get", "pods", label, "--output=json")
        return Command(words, f"look at the pods of {self.name}")

    def logs(self, pod: str) -> Command:
        """What a pod writes, from the beginning, as it comes."""
        return Command((*self._kubectl, "logs", "--follow", pod), f"follow the pod {pod}")

    def delete(self) -> Command:
        """Deletes it with its pods, and returns when they are gone."""
        words = (*self._kubectl, "delete", "jobsets", self.name, "--ignore-not-found")
        return Command(
            (*words, "--cascade=foreground", "--wait=true"), f"delete the JobSet {self.name}"
        )
