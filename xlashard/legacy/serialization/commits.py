"""What is still being written when the call that began it has returned."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from xlashard.legacy.serialization.specs import Spec, unwritable


@dataclass(frozen=True, eq=False)
class Commit:
    """A future of TensorStore whose errors say which array they are about.

    Programs call `result()` of it, in any thread, or await it.

    Attributes:
        future: TensorStore's.
        spec: Where the array is stored.
    """

    future: Any
    spec: Spec

    def result(self, timeout: float | None = None) -> Any:
        """Waits until it is written.

        Args:
            timeout: For how long, in seconds; None for as long as it takes.

        Raises:
            SerializationError: It can't be written.
            TimeoutError: It took longer.
        """
        try:
            return self.future.result(timeout=timeout)
        except ValueError as error:
            # no-catalogue: needs a storage that fails late
            raise unwritable(error, self.spec) from None

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Waits until it is written: why it could not be; None if it is."""
        error = self.future.exception(timeout=timeout)
        return unwritable(error, self.spec) if isinstance(error, ValueError) else error

    def done(self) -> bool:
        """Whether it is written, or can't be."""
        return self.future.done()

    def __await__(self) -> Generator[Any, None, Any]:
        try:
            return (yield from self.future.__await__())
        except ValueError as error:
            # no-catalogue: needs a storage that fails late
            raise unwritable(error, self.spec) from None
