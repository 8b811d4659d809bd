"""A headless Chromium driven over its own pipe, with nothing but the standard library.

The DevTools protocol over ``--remote-debugging-pipe``: JSON objects that end in a zero byte, on descriptors 3 and 4.
As a script it makes the picture in the documentation: ``python browser.py page.html report.png``.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

#: Seconds without any word from the browser after which it is taken for hung.
PATIENCE = 30
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_chromium() -> str | None:
    """The browser to test with: $CHROMIUM, else the first one on the PATH."""
    return os.environ.get("CHROMIUM") or next((path for name in NAMES if (path := shutil.which(name))), None)


#: Chromium reads descriptor 3 and writes 4; a small program moves ours there, since preexec_fn is unsafe with threads.
_MOVE = """
import fcntl, os, sys
ours = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
os.closerange(3, min(ours))
for number, wanted in zip(ours, (3, 4)):
    os.dup2(number, wanted)
    os.close(number)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Browser:
    """One tab. Use as a context manager; a request that Chromium refuses raises RuntimeError with its answer."""

    def __init__(self, binary: str) -> None:
        self._binary = binary
        self._stack = ExitStack()
        self._buffer = b""
        self._number = 0
        self._session = ""
        self._loaded = False
        self.requests: list[str] = []
        self.problems: list[str] = []

    def __enter__(self) -> Self:
        with self._stack:
            self._start()
            target = self.call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Network", "Log"):
                self.call(f"{domain}.enable")
            self._stack = self._stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def _start(self) -> None:
        profile = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="dsv4-matrix-browser-", ignore_cleanup_errors=True)
        )
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()
        self._stack.callback(os.close, self._in)
        self._stack.callback(os.close, self._out)
        arguments = [self._binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        arguments += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "about:blank"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _MOVE, str(to_child), str(from_child), *arguments],
            pass_fds=(to_child, from_child),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_child)
        os.close(from_child)
        self._stack.callback(self._process.wait)
        self._stack.callback(self._process.kill)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one request and wait for its answer; events on the way go to ``requests`` and ``problems``."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a local file in a window of that size, with the network cut, and wait until it has loaded."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        self.requests.clear()
        self.problems.clear()
        self._loaded = False
        self.call("Page.navigate", url=path.as_uri())
        while not self._loaded:
            self._note(self._receive())

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """One key, as a person would press it."""
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=_CODES[key])

    def write(self, text: str) -> None:
        """Type ``text`` into the focused element."""
        self.call("Input.insertText", text=text)

    def click(self, selector: str) -> None:
        """Click the middle of the first element that matches, after scrolling to it."""
        box = self.run(
            f"(e => {{ e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect(); "
            f"return [r.x + r.width / 2, r.y + r.height / 2]; }})(document.querySelector({json.dumps(selector)}))"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button="left", clickCount=1)

    def screenshot(self, height: int | None = None) -> bytes:
        """PNG of the window, or of its first ``height`` pixels."""
        clip = {}
        if height is not None:
            width = self.run("innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **clip)["data"])

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], PATIENCE)[0]:
                raise RuntimeError(f"Chromium did not answer request {self._number} within {PATIENCE} s")
            data = os.read(self._in, 65536)
            if not data:
                raise RuntimeError(f"Chromium ended with {self._process.wait()}")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\0")
        received: dict[str, Any] = json.loads(line)
        return received

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method"), event.get("params", {})
        if method == "Page.loadEventFired":
            self._loaded = True
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])


_CODES = {"Tab": 9, "Enter": 13}


if __name__ == "__main__":
    page, picture = sys.argv[1:]
    found = find_chromium()
    if found is None:
        raise SystemExit(f"no browser: install one of {', '.join(NAMES)}, or set CHROMIUM")
    with Browser(found) as tab:
        tab.open(Path(page).resolve(), width=880, height=780)
        Path(picture).write_bytes(tab.screenshot())
