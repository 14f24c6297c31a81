"""As much of the WebDriver protocol as the page's tests need, over plain HTTP."""

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Callable, Iterator

_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's own name for a reference
ENTER, ESCAPE = "\ue007", "\ue00c"


def missing() -> str | None:
    """Why no browser can be driven here."""
    names = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"{' and '.join(names)} not on PATH" if names else None


class Browser:
    def __init__(self, port: int, width: int, dark: bool):
        self._base = f"http://127.0.0.1:{port}"
        flags = [
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            f"--window-size={width},800",
        ]
        if dark:
            flags.append("--blink-settings=preferredColorScheme=0")
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": shutil.which("chromium"), "args": flags},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._base += f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, body: object = None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._base + path, data, {"Content-Type": "application/json"}, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(json.load(error)["value"]["message"]) from None

    def open(self, url: str) -> None:
        self._call("POST", "/url", {"url": url})

    def _element(self, selector: str) -> str:
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        return f"/element/{found[_ELEMENT]}"

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._element(selector)}/click", {})

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self._element(selector)}/value", {"text": text})

    def text(self, selector: str) -> str:
        return self._call("GET", f"{self._element(selector)}/text")

    def run(self, script: str):
        return self._call("POST", "/execute/sync", {"script": script, "args": []})

    def count(self, selector: str) -> int:
        return self.run(f"return document.querySelectorAll({json.dumps(selector)}).length")

    def log(self, kind: str) -> list[dict]:
        return self._call("POST", "/se/log", {"type": kind})

    def requested(self) -> list[str]:
        """Addresses of everything that the page asked for so far."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]

    def wait(self, condition: Callable[[], bool], seconds: float = 15) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s; the page shows: {self.text('body')}"
            time.sleep(0.05)

    def close(self) -> None:
        self._call("DELETE", "")


@contextlib.contextmanager
def browser(width: int = 1000, dark: bool = False) -> Iterator[Browser]:
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        port = None
        while port is None:
            line = driver.stdout.readline()
            assert line, "chromedriver ended before it said its port"
            if found := re.search(r"started successfully on port (\d+)", line):
                port = int(found[1])
        made = Browser(port, width, dark)
        try:
            yield made
        finally:
            made.close()
    finally:
        driver.terminate()
        driver.communicate(timeout=10)
