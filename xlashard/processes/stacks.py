"""What the threads of this process are doing, as Python sees it.

Of what they do below Python, in a collective for example, nothing can be had from inside.
"""

import linecache
import sys
import threading
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any

from xlashard.lazily import dataclass
from xlashard.processes.calls import waits_for_device
from xlashard.processes.notes import is_inner

OWN_THREADS = "xlashard-"
"""How the names of threads begin that are this package's own, and left out."""

# Frames that are kept of a thread, from the innermost.
_DEEPEST = 60
_RUNTIME = ("jax", "jaxlib")


@dataclass(frozen=True)
class Frame:
    """One call on a stack.

    Attributes:
        file: The path of the file.
        line: The line that runs.
        function: The name of the function.
        source: The text of that line.
        kind: `"user"`, `"runtime"` (JAX and this package), or `"library"` (all others).
    """

    file: str
    line: int
    function: str
    source: str
    kind: str

    @property
    def place(self) -> str:
        """In short: `data.py:31 in next_batch`."""
        return f"{Path(self.file).name}:{self.line} in {self.function}"

    def __str__(self) -> str:
        return f"{self.place}: {self.source}" if self.source else self.place


@dataclass(frozen=True)
class ThreadStack:
    """One thread.

    Attributes:
        name: Its name.
        main: Whether it is the main thread.
        on_device: Whether it is in a call that has no frame and runs, or waits, on devices.
        frames: Its calls, the innermost first.
    """

    name: str
    main: bool
    on_device: bool
    frames: tuple[Frame, ...]

    def to_json(self) -> dict[str, Any]:
        """For another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, said: dict[str, Any]) -> "ThreadStack":
        """From another process."""
        frames = tuple(Frame(**frame) for frame in said["frames"])
        return cls(said["name"], said["main"], said["on_device"], frames)

    @property
    def in_runtime(self) -> bool:
        """Whether it is in a call of JAX, or of this package, that a user's line made."""
        kinds = [frame.kind for frame in self.frames if frame.kind != "library"]
        return self.on_device or kinds[:1] == ["runtime"]

    @property
    def user_frame(self) -> Frame | None:
        """The innermost line of the user's own program; any line, if there is none."""
        users = (frame for frame in self.frames if frame.kind == "user")
        return next(users, self.frames[0] if self.frames else None)

    def text(self) -> str:
        """The calls as a traceback shows them, the innermost last.

        Of calls that JAX and this package make among themselves the first and the last are shown.
        """
        lines = [f"thread {self.name!r}:"]
        inner = next((i for i, one in enumerate(self.frames) if one.kind != "runtime"), 0)
        for number, frame in reversed(tuple(enumerate(self.frames))):
            if 0 < number < inner - 1:
                if number == 1:
                    lines.append(f"    [{inner - 2} more inside]")
                continue
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.source:
                lines.append(f"    {frame.source}")
        return "\n".join(lines)


def own_stacks() -> tuple[ThreadStack, ...]:
    """All threads of this process but this package's own, the main thread first."""
    threads = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    found = []
    for ident, frame in sys._current_frames().items():
        thread = threads.get(ident)
        name = thread.name if thread else f"thread {ident}"
        if not name.startswith(OWN_THREADS):
            on_device = waits_for_device(frame)
            found.append(ThreadStack(name, ident == main, on_device, _frames(frame)))
    return tuple(sorted(found, key=lambda stack: (not stack.main, stack.name)))


def _frames(frame: FrameType | None) -> tuple[Frame, ...]:
    frames = []
    while frame is not None and len(frames) < _DEEPEST:
        file, line = frame.f_code.co_filename, frame.f_lineno
        source = linecache.getline(file, line).strip()
        frames.append(Frame(file, line, frame.f_code.co_name, source, _kind(file)))
        frame = frame.f_back
    return tuple(frames)


def _kind(file: str) -> str:
    if is_inner(file):
        return "runtime"
    folders = Path(file).parts
    if "site-packages" in folders:
        package = folders[folders.index("site-packages") + 1]
        return "runtime" if package in _RUNTIME else "library"
    if file.startswith(("<", sys.base_prefix)):
        return "library"
    return "user"
