"""Headless Chromium, driven over a pipe by its DevTools protocol.

Starting a browser takes a fifth of the time of a test suite of small tests, so one serves all tests
of a module, each with its own pages. The pipe needs no port and no package.
"""

import base64
import itertools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
COMMAND = "apt-get install --yes --no-install-recommends chromium fonts-liberation"
_GONE = re.compile("navigated|collected|context was destroyed|Cannot find context")
_PATIENCE = 60.0
_FLAGS = (
    "--headless",
    "--remote-debugging-pipe",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--no-first-run",
    "--hide-scrollbars",
    "--force-color-profile=srgb",
)
_KEYS = {
    "Enter": (13, "\r"),
    " ": (32, " "),
    "Tab": (9, ""),
    "ArrowRight": (39, ""),
    "ArrowDown": (40, ""),
    "PageDown": (34, ""),
    "Delete": (46, ""),
}


class BrowserError(Exception):
    """Missing browser, or a failed command of one."""


def find_browser() -> str:
    """Return the path of Chromium, or raise an error that shows how to install it."""
    given = os.environ.get("XLASHARD_TEST_BROWSER")
    for name in (given,) if given else NAMES:
        if (path := shutil.which(name)) is not None:
            return path
    raise BrowserError(
        f"the tests of HTML pages need Chromium, and none of {', '.join(NAMES)} is on the PATH. "
        f"On Debian, as root: {COMMAND}. Elsewhere install Chromium or Chrome and set "
        "XLASHARD_TEST_BROWSER to its path"
    )


class Browser:
    """Running Chromium."""

    def __init__(self, folder: Path) -> None:
        to_browser, ours_out = os.pipe()
        ours_in, from_browser = os.pipe()
        self._in, self._out = ours_in, ours_out
        # Chromium reads commands from descriptor 3 and writes replies to 4.
        command = (
            f'exec 3<&{to_browser} 4>&{from_browser}; exec "$0" "$@"',
            find_browser(),
            *_FLAGS,
            f"--user-data-dir={folder / 'profile'}",
            "about:blank",
        )
        self._log = (folder / "browser.log").open("w+b")
        self._process = subprocess.Popen(
            ["/bin/bash", "-c", *command],
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._numbers = itertools.count(1)
        self._unread = b""
        self._events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its reply."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": params}
        if session is not None:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") != number:
                self._events.append(answer)
                continue
            if "error" in answer:
                raise BrowserError(f"{method}: {answer['error']['message']}")
            return answer["result"]

    def events(self, session: str | None = None) -> list[dict[str, Any]]:
        """Return the events of a page since it was opened, or of the browser."""
        return [event for event in self._events if event.get("sessionId") == session]

    def forget(self) -> None:
        """Forget all events so far."""
        self._events.clear()

    def wait_for(self, name: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """Wait until an event with these parameters was reported, and return all its parameters."""
        while True:
            for event in self.events(session):
                if event["method"] == name and params.items() <= event["params"].items():
                    return event["params"]
            self._events.append(self._next(name))

    def _next(self, what: str) -> dict[str, Any]:
        deadline = time.monotonic() + _PATIENCE
        while b"\0" not in self._unread:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            more = os.read(self._in, 1 << 20) if ready else b""
            if not more:
                why = "closed the pipe" if ready else f"gave no answer in {_PATIENCE:.0f} s"
                self._log.seek(0)
                log = self._log.read().decode(errors="replace")[-2000:]
                raise BrowserError(f"{what}: Chromium {why}. It wrote:\n{log}")
            self._unread += more
        line, self._unread = self._unread.split(b"\0", 1)
        return json.loads(line)

    def close(self) -> None:
        """End the browser and all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._log.close()

    @contextmanager
    def page(
        self, html: str, *, width: int = 1280, height: int = 900, dark: bool = False, **other: Any
    ) -> Iterator["Tab"]:
        """Open a page and wait until it is loaded.

        Args:
            html: The page.
            width: Width of the window, in CSS pixels.
            height: Height of the window, in CSS pixels.
            dark: Whether the system's colours are dark.
            other: `scripts=False` to disable scripts; `print=True` for the print medium.
        """
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        tab = Tab(self, session)
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                tab.call(f"{domain}.enable")
            tab.resize(width, height)
            tab.prefer("dark" if dark else "light", media="print" if other.get("print") else "")
            if not other.get("scripts", True):
                tab.call("Emulation.setScriptExecutionDisabled", value=True)
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "page.html"
                path.write_text(html, encoding="utf-8")
                tab.go(path.as_uri())
                yield tab
        finally:
            self.call("Target.closeTarget", targetId=target)


@dataclass
class Tab:
    """Open page."""

    browser: Browser
    session: str

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol."""
        return self.browser.call(method, self.session, **params)

    def go(self, url: str | None = None) -> None:
        """Open an address, or reload the page, and wait until it is loaded."""
        self.browser.forget()
        if url is None:
            self.call("Page.reload")
        else:
            self.call("Page.navigate", url=url)
        self.browser.wait_for("Page.loadEventFired", self.session)

    def resize(self, width: int, height: int) -> None:
        """Resize the window."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str, *, media: str = "") -> None:
        """Set the system's colours, `light` or `dark`, and the medium, such as `print`."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=features, media=media)

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page."""
        done = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in done:
            details = done["exceptionDetails"]
            raise BrowserError(details.get("exception", details).get("description", str(details)))
        return done["result"].get("value")

    def until(self, script: str) -> None:
        """Wait until an expression in the page, or in the one that follows it, is true."""
        while True:
            try:
                self.run(
                    "new Promise(done => { const look = () => "
                    f"({script}) ? done() : requestAnimationFrame(look); look(); }})"
                )
                break
            except BrowserError as error:
                # A click leads to another page, which discards the promise of this one.
                if not _GONE.search(str(error)):
                    raise

    def texts(self, selector: str) -> list[str]:
        """Return the stripped texts of all visible elements."""
        return self.run(
            f"[...document.querySelectorAll({json.dumps(selector)})]"
            ".filter(e => e.checkVisibility()).map(e => (e.innerText ?? e.textContent).trim())"
        )

    def text(self, selector: str) -> str:
        """Return the text of the only visible element."""
        (text,) = self.texts(selector)
        return text

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first visible element."""
        place = self.point_at(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **place)

    def point_at(self, selector: str) -> dict[str, float]:
        """Move the mouse to the middle of the first visible element."""
        place = self.run(
            f"(() => {{ const e = [...document.querySelectorAll({json.dumps(selector)})]"
            ".find(e => e.checkVisibility()); e.scrollIntoView({block: 'center'});"
            " const b = e.getBoundingClientRect();"
            " return {x: b.x + b.width / 2, y: b.y + b.height / 2}; })()"
        )
        self.call("Input.dispatchMouseEvent", type="mouseMoved", button="none", **place)
        return place

    def focus(self, selector: str) -> None:
        """Focus the first matching element."""
        self.run(f"document.querySelector({json.dumps(selector)}).focus()")

    def type(self, text: str) -> None:
        """Type into the focused element."""
        self.call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key in the focused element."""
        code, text = _KEYS[key]
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": 8 if shift else 0}
        written = {"text": text} if text else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **common, **written)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def requests(self) -> list[str]:
        """Return all requests of the page except for itself."""
        asked = [
            event["params"]["request"]["url"]
            for event in self.browser.events(self.session)
            if event["method"] == "Network.requestWillBeSent"
        ]
        return asked[1:]

    def complaints(self) -> list[str]:
        """Return the browser's console: errors, warnings and logs."""
        names = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [
            json.dumps(event["params"])
            for event in self.browser.events(self.session)
            if event["method"] in names
        ]

    def picture(self, *, whole: bool = True, scale: float = 1.0) -> bytes:
        """Return the page as PNG.

        Args:
            whole: Whether to capture all of the page, not only the window.
            scale: Pixels of the picture per CSS pixel.
        """
        width, height = self.run(
            f"[innerWidth, {'document.documentElement.scrollHeight' if whole else 'innerHeight'}]"
        )
        clip = {"x": 0, "y": 0, "width": width, "height": height, "scale": scale}
        shot = self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=whole, clip=clip
        )
        return base64.b64decode(shot["data"])


@contextmanager
def started() -> Iterator[Browser]:
    """Yield a browser that ends with the block."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        browser = Browser(Path(folder))
        try:
            yield browser
        finally:
            browser.close()
