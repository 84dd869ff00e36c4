"""What all steps of a script share: the settings, and what runs commands."""

from dataclasses import dataclass
from functools import cached_property

from xlashard.cloud.accelerators import Accelerator, read_accelerator
from xlashard.cloud.commands import Runner, Say
from xlashard.cloud.gcloud import Gcloud
from xlashard.cloud.retrying import Backoff, Clock, Patience
from xlashard.cloud.settings import CloudSettings, check_name
from xlashard.cloud.slices import Survey, Worker, expected_workers, survey


@dataclass(frozen=True)
class Session:
    """One call of a script.

    Attributes:
        settings: What was asked for.
        runner: Runs commands, or only shows them.
        clock: By which waiting passes.
        say: Tells the user what is being done.
    """

    settings: CloudSettings
    runner: Runner
    clock: Clock
    say: Say

    @cached_property
    def gcloud(self) -> Gcloud:
        """Writes the commands for this TPU.

        Raises:
            CloudError: It has no name, or a wrong one.
        """
        check_name(self.settings.tpu.name)
        return Gcloud(self.settings.tpu)

    @cached_property
    def accelerator(self) -> Accelerator:
        """What was asked for.

        Raises:
            CloudError: There is no such type.
        """
        return read_accelerator(self.settings.tpu.accelerator)

    @cached_property
    def patience(self) -> Patience:
        """How often a command is tried again that failed."""
        wait = self.settings.wait
        return Patience(Backoff(wait.ssh_wait, tries=wait.ssh_tries), self.clock, self.say)

    def survey(self) -> Survey:
        """What there is of the TPU now.

        Raises:
            CloudError: gcloud fails, again and again.
        """
        return survey(self.gcloud, self.runner, self.patience)

    def expected(self) -> tuple[Worker, ...]:
        """The workers that there will be, for a dry run."""
        return expected_workers(self.gcloud, self.accelerator.hosts)
