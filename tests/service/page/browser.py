"""A headless Chromium for tests: driven by selenium, with a fresh profile, and cut off from every
host but this one."""

import json
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium.webdriver import Chrome
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
DRIVER = shutil.which("chromedriver")
MISSING = (
    None if CHROMIUM and DRIVER else "needs Chromium and chromedriver, and they are not on the path"
)
FLAGS = (
    *(
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-sync",
        "--no-first-run",
    ),
    *("--disable-component-update", "--disable-dev-shm-usage", "--window-size=1280,900"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
WAIT_SECONDS = 300


class Browser:
    """The few things that the tests do."""

    def __init__(self, driver: Chrome, url: str) -> None:
        self.driver = driver
        self.url = url

    def open(self, path: str = "/") -> None:
        self.driver.get(
            "about:blank"
        )  # a change of the fragment alone would not load the page anew
        self.driver.get(self.url + path)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector: str) -> str:
        return self.find(selector).text

    def value(self, selector: str) -> str:
        """What a field of a form holds."""
        return str(self.find(selector).get_property("value"))

    def run(self, script: str, *arguments: object) -> Any:
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition: Callable[[], T], what: str) -> T:
        """Until ``condition()`` is true; its value."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(
            f"waited in vain for {what}; the page says: {self.text('body')[:2000]}"
        )

    def devtools(self, command: str, **arguments: object) -> dict[str, Any]:
        return dict(self.driver.execute_cdp_cmd(command, arguments))

    def media(self, **features: str) -> None:
        wanted = [
            {"name": name.replace("_", "-"), "value": value} for name, value in features.items()
        ]
        self.devtools("Emulation.setEmulatedMedia", features=wanted)

    def resize(self, width: int, height: int = 900, is_mobile: bool = False) -> None:
        self.devtools(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=is_mobile,
        )

    def log(self, kind: str) -> list[dict[str, Any]]:
        """The entries of a log of the browser since the last call."""
        return list(self.driver.get_log(kind))  # type: ignore[no-untyped-call]

    def complaints(self) -> list[dict[str, Any]]:
        """What the console holds, but for answers that the page asked for and shows: those of the
        network."""
        return [entry for entry in self.log("browser") if entry["source"] != "network"]

    def requested(self) -> list[str]:
        """The address of every request since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            each["params"]["request"]["url"]
            for each in messages
            if each["method"] == "Network.requestWillBeSent"
        ]


@contextmanager
def chromium(url: str, profile: Path) -> Iterator[Browser]:
    """A browser for the service at ``url``."""
    options = Options()
    assert CHROMIUM is not None
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        yield Browser(driver, url)
    finally:
        driver.quit()
