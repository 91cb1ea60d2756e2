"""A headless Chromium that tests steer through its pipe: open an address, ask the page, press, take a picture.

Owns the process and the few commands of its protocol that are needed: messages of JSON, ended by a zero byte, on the
descriptors 3 and 4. Windows have exactly the size that is asked for, as small as a telephone's.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
ANSWER_LIMIT_S = 60.0
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe")
FIRST_FREE = 20
"""Descriptors from here on are not those that the browser wants."""


class Browser:
    """One page."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._received = b""
        self._num_sent = 0
        self._session: dict[str, str] = {}

    def open(self, address: str, width: int, height: int) -> None:
        """Shows an address in a window of a size."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = {"sessionId": self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
        self._call("Emulation.setDeviceMetricsOverride", **size)
        self._call("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, expression: str, limit_s: float) -> None:
        """Until it is true; AssertionError with the page's text when that takes too long."""
        ends_s = time.monotonic() + limit_s
        while not self.ask(expression):
            text = self.ask("document.body.innerText") if time.monotonic() > ends_s else None
            assert text is None, f"not {expression} in {text}"

    def picture(self, path: Path) -> None:
        """Of the window."""
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._num_sent += 1
        message = {"id": self._num_sent, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._num_sent:
                assert "error" not in answer, (method, answer)
                return answer["result"]  # type: ignore[no-any-return]

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            readable, _, _ = select.select([self._back], [], [], ANSWER_LIMIT_S)
            received = os.read(self._back, 1 << 20) if readable else b""
            assert received, "the browser has ended, or says nothing any more"
            self._received += received
        first, _, self._received = self._received.partition(b"\0")
        return json.loads(first)  # type: ignore[no-any-return]


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser with its files in `folder`; skips where none is installed."""
    program = next(filter(None, map(shutil.which, NAMES)), None)
    if program is None:
        pytest.skip(f"no browser is installed: none of {', '.join(NAMES)} is on PATH")
    with contextlib.ExitStack() as stack:
        theirs_in, to = stack.enter_context(_pipe())
        back, theirs_out = stack.enter_context(_pipe())
        given = f'exec "$0" "$@" 3</proc/self/fd/{theirs_in} 4>/proc/self/fd/{theirs_out}'
        argv = ["/bin/sh", "-c", given, program, *FLAGS, f"--user-data-dir={folder}"]
        ends = theirs_in, theirs_out
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, pass_fds=ends)
        try:
            yield Browser(to, back)
        finally:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _pipe() -> Iterator[tuple[int, int]]:
    """The end to read from and the one to write to."""
    low = os.pipe()
    ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, FIRST_FREE) for end in low]
    for end in low:
        os.close(end)
    try:
        yield ends[0], ends[1]
    finally:
        for end in ends:
            os.close(end)
