"""A real headless Chromium, spoken to through its DevTools protocol by the WebSocket client that is there anyway."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Self

import aiohttp

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome", "chrome")

PATIENCE_SECONDS = 60.0
"""For the browser to start, and for a page to become what is waited for."""

FLAGS = (
    "--headless",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-quic",
    "--remote-debugging-port=0",
)


def find_browser() -> str | None:
    """`$CHROMIUM`, or the first Chromium on the path; None without one."""
    return os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """A tab. Every message that the page writes on its console as an error, and every exception, is in `faults`."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.faults: list[str] = []
        self.requests: list[str] = []
        self._socket = socket
        self._number = 0

    async def send(self, method: str, **parameters: Any) -> dict[str, Any]:  # Any: JSON values
        """The result of a command of the protocol."""
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        while True:
            message = json.loads((await self._socket.receive(PATIENCE_SECONDS)).data)
            self._note(message)
            if message.get("id") == self._number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]  # Any: as above
                return result

    def _note(self, message: dict[str, Any]) -> None:  # Any: JSON values
        parameters = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.faults.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(parameters["request"]["url"])

    async def run(self, expression: str) -> Any:  # Any: the value as JSON
        """The value of an expression in the page; a promise is waited for."""
        result = await self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def until(self, expression: str) -> None:
        """Return once `expression` is true in the page, looked at with every frame that it draws."""
        look = f"(() => {{ try {{ return {expression} }} catch {{ return false }} }})()"
        await self.run(
            "new Promise((done, failed) => { const end = Date.now() + 30000; const look = () => "
            f"{look} ? done() : Date.now() > end ? failed(new Error('never: ' + {json.dumps(expression)})) "
            ": setTimeout(look, 20); look() })"
        )

    async def open(self, path: Path) -> None:
        """The report at `path`, loaded from disk, its first row on show."""
        await self.send("Page.navigate", url=path.as_uri())
        await self.until("location.protocol === 'file:' && document.documentElement.dataset.ready === 'yes'")

    async def press(self, key: str) -> None:
        """A key by its name: `ArrowDown`, `Tab`."""
        codes = {"Tab": 9, "End": 35, "Home": 36, "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40}
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=codes[key])

    async def type(self, text: str) -> None:
        """`text` into what has the focus."""
        await self.send("Input.insertText", text=text)

    async def screenshot(self, *, width: int, height: int, scheme: str = "light") -> bytes:
        """The page as a PNG, for a person who works on it."""
        await self.look(width=width, height=height, scheme=scheme)
        await self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        result = await self.send("Page.captureScreenshot", format="png")
        return base64.b64decode(result["data"])

    async def look(self, *, width: int, height: int, scheme: str) -> None:
        """The size and the colours that the page is seen in."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.send("Emulation.setEmulatedMedia", features=features)

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, browser: str) -> AsyncIterator[Self]:
        """A tab of a browser of its own, which ends with it."""
        with tempfile.TemporaryDirectory(prefix="browser-", ignore_cleanup_errors=True) as profile:
            process = await asyncio.create_subprocess_exec(
                browser,
                *FLAGS,
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
                f"--user-data-dir={profile}",
                "about:blank",
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
            try:
                address = await asyncio.wait_for(_address(process), PATIENCE_SECONDS)
                async with aiohttp.ClientSession() as session:
                    async with session.get(f"http://{address}/json/list") as reply:
                        tab = next(entry for entry in await reply.json() if entry["type"] == "page")
                    async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                        page = cls(socket)
                        for domain in ("Runtime", "Log", "Page", "Network"):
                            await page.send(f"{domain}.enable")
                        yield page
            finally:
                process.terminate()
                await process.communicate()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Host and port, which the browser tells once it listens."""
    assert process.stderr is not None
    async for line in process.stderr:
        if b"DevTools listening on ws://" in line:
            return line.decode().split("ws://", 1)[1].split("/", 1)[0]
    raise AssertionError("the browser ended before it listened")
