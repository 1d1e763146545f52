"""A browser without a screen, over its debugging protocol: Chromium, where one is installed."""

import asyncio
import base64
import re
import shutil
import subprocess
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []  # of what the page did wrong: its console, and what a policy refused

    async def ask(self, method: str, **values: Any) -> Mapping[str, Any]:
        self._number += 1
        await self._socket.send_json({"id": self._number, "method": method, "params": values})
        async for message in self._socket:
            told = message.json()
            if told.get("id") == self._number:
                assert "error" not in told, told
                return told["result"]
            if told["method"] in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(str(told["params"]))
        raise ConnectionError(method)

    async def open(self, url: str, *, width: int = 1280, height: int = 1600, key: str | None = None) -> None:
        """Returns when the page is there."""
        for part in ("Page", "Log", "Runtime", "Network"):
            await self.ask(f"{part}.enable")
        await self.ask(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        if key is not None:
            login = base64.b64encode(f"anyone:{key}".encode()).decode()
            await self.ask("Network.setExtraHTTPHeaders", headers={"Authorization": f"Basic {login}"})
        await self.ask("Page.navigate", url=url)
        await self.until("document.readyState == 'complete' && document.querySelector('main') != null")

    async def value(self, expression: str) -> Any:
        """Of an expression of JavaScript."""
        told = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    async def until(self, expression: str, give_up_s: float = 15) -> None:
        async with asyncio.timeout(give_up_s):
            while not await self.value(expression):
                await asyncio.sleep(0.05)

    async def screenshot(self, path: Path) -> None:
        told = await self.ask("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(told["data"]))


@asynccontextmanager
async def opened() -> AsyncGenerator[Browser]:
    """A new one, in a profile of its own."""
    assert CHROMIUM is not None
    with TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        words = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        words += ["--disable-background-networking", f"--user-data-dir={profile}", "--remote-debugging-port=0"]
        process = subprocess.Popen([CHROMIUM, *words, "about:blank"], stderr=subprocess.PIPE, text=True)
        try:
            assert process.stderr is not None
            port = await asyncio.to_thread(_port, process.stderr)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    tabs = [each for each in await answer.json() if each["type"] == "page"]
                async with session.ws_connect(tabs[0]["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                    yield Browser(socket)
        finally:
            process.kill()
            process.wait(10)
            if process.stderr is not None:
                process.stderr.close()


def _port(lines: Any) -> int:
    for line in lines:
        found = re.search(r"DevTools listening on ws://127\.0\.0\.1:(\d+)/", line)
        if found:
            return int(found[1])
    raise RuntimeError("the browser did not start")
