"""A real headless Chromium, driven by the DevTools protocol over a pipe: no driver, no port, no download.

In: the browser's program and a page on disk. Out: what the page does there: values of expressions, errors of
the console, requests. https://chromedevtools.github.io/devtools-protocol/
"""

import contextlib
import json
import os
import select
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import waits

TIMEOUT_S = 300.0  # only for what hangs
FLAGS = (
    *("--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-dev-shm-usage"),
    *("--hide-scrollbars", "--force-color-profile=srgb"),
)


class Browser:
    """One browser process."""

    def __init__(self, process: subprocess.Popen[bytes], to_browser: int, from_browser: int) -> None:
        self._process, self._to, self._from = process, to_browser, from_browser
        self._number = 0
        self._rest = b""
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer; events that come meanwhile are kept."""
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + TIMEOUT_S
        while True:
            answer = self._next(end)
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return dict(answer["result"])
            self.events.append(answer)

    def wait_for(self, event: str) -> dict[str, Any]:
        """The next event of a name, also one that came already."""
        end = time.monotonic() + TIMEOUT_S
        while True:
            for kept in self.events:
                if kept.get("method") == event:
                    self.events.remove(kept)
                    return kept
            self.events.append(self._next(end))

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, "the browser did not answer in time"
            data = os.read(self._from, 1 << 20)
            assert data, "the browser ended"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))


class Page:
    """One page in a browser."""

    def __init__(self, browser: Browser, session: str) -> None:
        self.browser, self.session = browser, session

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self.browser.call(method, self.session, **parameters)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        done = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait_until(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + TIMEOUT_S
        while not self.evaluate(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press and release a key, such as ArrowLeft or Tab."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=KEYS[key])

    def troubles(self) -> list[str]:
        """Errors and warnings of the console, and uncaught exceptions, so far."""
        self.evaluate("0")  # what happened before has been told by then
        found = []
        for event in self.browser.events:
            told = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    found.append(json.dumps(told["exceptionDetails"]))
                case "Runtime.consoleAPICalled" if told["type"] in {"error", "warning", "assert"}:
                    found.append(json.dumps(told["args"]))
                case "Log.entryAdded":
                    found.append(f"{told['entry']['level']}: {told['entry']['text']}")
        return found

    def requests(self) -> list[str]:
        """Every address that the page asked for, other than data in itself."""
        self.evaluate("0")
        sent = [event for event in self.browser.events if event.get("method") == "Network.requestWillBeSent"]
        addresses = [str(event["params"]["request"]["url"]) for event in sent]
        return [address for address in addresses if not address.startswith("data:")]


KEYS = {"ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, "Tab": 9, "Enter": 13}


@contextlib.contextmanager
def started(program: Path, folder: Path) -> Iterator[Browser]:
    """A running browser with a profile of its own in a folder."""
    to_read, to_write = os.pipe()
    from_read, from_write = os.pipe()
    # The browser reads commands from descriptor 3 and writes answers to descriptor 4.
    command = f'exec "$@" 3<&{to_read} 4>&{from_write}'
    process = subprocess.Popen(
        ["bash", "-c", command, "bash", str(program), *FLAGS, f"--user-data-dir={folder}", "about:blank"],
        pass_fds=(to_read, from_write),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder)},
    )
    os.close(to_read)
    os.close(from_write)
    try:
        yield Browser(process, to_write, from_read)
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(timeout=waits.LIMIT_S)
        os.close(to_write)
        os.close(from_read)


def opened(
    browser: Browser, file: Path, *, width: int, height: int, dark: bool = False, mobile: bool = False
) -> Page:
    """A page of a file, loaded, in a window of this size."""
    target = browser.call("Target.createTarget", url="about:blank")["targetId"]
    session = browser.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    page = Page(browser, session)
    browser.events.clear()
    for domain in ("Page", "Runtime", "Log", "Network"):
        page.call(f"{domain}.enable")
    page.call(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=2 if mobile else 1,
        mobile=mobile,
    )
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    page.call("Emulation.setEmulatedMedia", features=[scheme])
    page.call("Page.navigate", url=file.as_uri())
    # On a busy machine the event of about:blank may come after the command.
    complete = f"location.href === {json.dumps(file.as_uri())} && document.readyState === 'complete'"
    while True:
        browser.wait_for("Page.loadEventFired")
        if page.evaluate(complete):
            return page
