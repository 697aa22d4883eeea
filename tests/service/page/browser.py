"""A headless Chromium for tests: driven by selenium, with a fresh profile, and cut off from every host but this one."""

import json
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
MISSING = None if CHROMIUM and DRIVER else "needs Chromium and chromedriver, and they are not on the path"
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"),
    *("--disable-component-update", "--disable-dev-shm-usage", "--window-size=1280,900"),
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
WAIT_SECONDS = 300


class Browser:
    """The few things that the tests do."""

    def __init__(self, driver, url):
        self.driver = driver
        self.url = url

    def open(self, path="/"):
        self.driver.get("about:blank")  # a change of the fragment alone would not load the page anew
        self.driver.get(self.url + path)

    def find(self, selector):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def text(self, selector):
        return self.find(selector).text

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def wait(self, condition, what):
        """Until ``condition()`` is true; its value."""
        deadline = time.monotonic() + WAIT_SECONDS
        while time.monotonic() < deadline:
            found = condition()
            if found:
                return found
            time.sleep(0.02)
        raise AssertionError(f"waited in vain for {what}; the page says: {self.text('body')[:2000]}")

    def devtools(self, command, **arguments):
        return self.driver.execute_cdp_cmd(command, arguments)

    def media(self, **features):
        wanted = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        self.devtools("Emulation.setEmulatedMedia", features=wanted)

    def resize(self, width, height=900, is_mobile=False):
        self.devtools("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=is_mobile)

    def complaints(self):
        """What the console holds, but for answers that the page asked for and shows: those of the network."""
        return [entry for entry in self.driver.get_log("browser") if entry["source"] != "network"]

    def requested(self):
        """The address of every request since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        return [each["params"]["request"]["url"] for each in messages if each["method"] == "Network.requestWillBeSent"]


@contextmanager
def chromium(url: str, profile: Path):
    """A browser for the service at ``url``."""
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(executable_path=DRIVER))
    try:
        yield Browser(driver, url)
    finally:
        driver.quit()
