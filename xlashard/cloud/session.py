"""One call of a script: its settings, its commands, and retries of commands."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from xlashard.cloud.accelerators import Accelerator, read_accelerator
from xlashard.cloud.cloud_settings import CloudSettings, check_name
from xlashard.cloud.gcloud import Command, Finished, Gcloud, Runner

_LONGEST_WAIT = 60.0


def backoff(first: float, limit: float = _LONGEST_WAIT) -> Iterator[float]:
    """Yield seconds to wait, each twice the one before, up to a limit.

    Example:
        >>> waits = backoff(10, limit=30)
        >>> [next(waits) for _ in range(4)]
        [10, 20, 30, 30]
    """
    while True:
        yield min(first, limit)
        first *= 2


@dataclass(frozen=True)
class Session:
    """One call of a script.

    Attributes:
        settings: Settings of the call.
        runner: Runs the commands.
        report: Prints a line about the progress.
        sleep: Waits for some seconds.
    """

    settings: CloudSettings
    runner: Runner
    report: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep

    @cached_property
    def gcloud(self) -> Gcloud:
        """Commands for this TPU.

        Raises:
            CloudError: The name of the TPU is missing or invalid.
        """
        check_name(self.settings.tpu.name)
        return Gcloud(self.settings.tpu)

    @cached_property
    def accelerator(self) -> Accelerator:
        """Type of the TPU.

        Raises:
            CloudError: The type is missing or unknown.
        """
        return read_accelerator(self.settings.tpu.accelerator)

    def retry(
        self, command: Command, is_final: Callable[[Finished], bool] = lambda done: False
    ) -> Finished:
        """Run a command until it succeeds, `--ssh_tries` times at most.

        Args:
            command: The command; running it several times must do no harm.
            is_final: Whether another attempt could not help.

        Returns:
            The last attempt.
        """
        wait = self.settings.wait
        waits = backoff(wait.ssh_wait)
        done = self.runner.run(command)
        for attempt in range(2, wait.ssh_tries + 1):
            if done.code == 0 or is_final(done):
                break
            pause = next(waits)
            self.report(
                f"could not {command.purpose} (exit code {done.code}: {done.last_error}); attempt "
                f"{attempt} of {wait.ssh_tries} in {pause:g} s"
            )
            self.sleep(pause)
            done = self.runner.run(command)
        return done
