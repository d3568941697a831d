"""A headless Chromium, driven over DevTools' protocol on a pipe."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_OPTIONS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--remote-debugging-pipe",
)
_WAIT_S = 240.0


class Page:
    """A page of the browser. ``urls`` are those that it asked for, ``complaints`` what it wrote to the
    console: errors, uncaught exceptions and violations of the content security policy."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._read = b""
        self._last = 0
        self._session: str | None = None
        self.urls: list[str] = []
        self.complaints: list[str] = []
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self._last += 1
        message = {"id": self._last, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._last:
            self._note(answer)
        assert "error" not in answer, (method, answer)
        return dict(answer["result"])

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            got = os.read(self._from, 2**16)
            assert got, "the browser has ended"
            self._read += got
        message, _, self._read = self._read.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.urls.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.complaints.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.complaints.append(f"{parameters['entry']['text']} {parameters['entry'].get('url')}")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, awaited if it is a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, (expression[:200], answer)
        return answer["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _WAIT_S
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > deadline:
                pytest.fail(f"never true: {expression}\n{self.evaluate('document.body.innerText')}")
            time.sleep(0.02)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        self.until(f"location.href === {url!r} && document.readyState === 'complete'")

    def press(self, key: str, code: int) -> None:
        """Press and release a key."""
        text = {"Enter": "\r", " ": " "}.get(key, "")
        what = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.send("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **what)
        self.send("Input.dispatchKeyEvent", type="keyUp", **what)

    def type(self, text: str) -> None:
        self.send("Input.insertText", text=text)

    def choose_files(self, selector: str, paths: list[Path]) -> None:
        found = self.send("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
        files = [str(path) for path in paths]
        self.send("DOM.setFileInputFiles", files=files, objectId=found["result"]["objectId"])

    def look(self, *, width: int, height: int, scheme: str) -> None:
        """Set the size of the window, and the colours that its user prefers: "light" or "dark"."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def violations(self) -> list[Any]:
        """What axe-core finds wrong for people with disabilities: impact, rule, elements."""
        axe = find_spec("axe_playwright_python")  # whose import would need Playwright
        if axe is None or axe.submodule_search_locations is None:
            pytest.skip("needs axe-core")
        script = Path(axe.submodule_search_locations[0], "axe.min.js").read_text(encoding="utf-8")
        self.evaluate(f"window.axe || (() => {{ {script}\n }})(), 0")
        found = self.evaluate(
            "axe.run().then((found) => found.violations.map("
            "(one) => [one.impact, one.id, one.nodes.map((node) => node.html)]))"
        )
        return list(found)

    def screenshot(self, path: Path) -> None:
        taken = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextmanager
def browsing(profile: Path) -> Iterator[Page]:
    """Run a browser with an empty profile until the block ends."""
    assert PROGRAM is not None
    to_browser, from_browser = os.pipe(), os.pipe()
    # The browser reads commands from descriptor 3 and answers on 4.
    shell = f'exec "$@" 3<&{to_browser[0]} 4>&{from_browser[1]}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "browser", PROGRAM, *_OPTIONS, f"--user-data-dir={profile}"],
        pass_fds=(to_browser[0], from_browser[1]),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(to_browser[0])
    os.close(from_browser[1])
    try:
        yield Page(to_browser[1], from_browser[0])
    finally:
        os.close(to_browser[1])  # which ends the browser
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(from_browser[0])
