"""A headless Chromium."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SECONDS = 15


class Page:
    """Access to a page."""

    def __init__(self, driver: Any, address: str) -> None:
        self.driver = driver
        self.address = address

    def open(self, place: str) -> None:
        """Open an address of the page, such as `run?run=a`, with a reload."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.address}#/{place}")
        self.wait(lambda: self.all("main:not([aria-busy]) > *"))

    def all(self, selector: str) -> list[Any]:
        return list(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def element(self, selector: str) -> Any:
        return self.wait(lambda: self.all(selector))[0]

    def texts(self, selector: str) -> list[str]:
        script = "return [...document.querySelectorAll(arguments[0])].map((one) => one.textContent)"
        return list(self.driver.execute_script(script, selector))

    def text(self) -> str:
        return str(self.element("main").text)

    def run(self, script: str, *values: object) -> Any:
        return self.driver.execute_script(script, *values)

    def wait(self, holds: Callable[[], Any]) -> Any:
        return WebDriverWait(self.driver, SECONDS, poll_frequency=0.02).until(lambda _: holds())

    def complaints(self) -> list[str]:
        """Return messages of the browser's console: script errors and violations of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def leaving(driver: Any) -> Iterator[Any]:
    """Leave the page after the block, before its server ends, and forget its settings."""
    driver.get_log("browser")
    try:
        yield driver
    finally:
        driver.get("about:blank")
        driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": "*", "storageTypes": "all"})
        driver.get_log("browser")


@contextmanager
def looking(driver: Any, width: int, height: int, dark: bool = False) -> Iterator[None]:
    """Give the page another size, and a light or a dark system, during the block."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
    try:
        yield
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@contextmanager
def chromium(width: int = 1280, height: int = 900, dark: bool = False) -> Iterator[Any]:
    """Start a Chromium."""
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    flags = ["headless=new", "no-sandbox", "disable-gpu", "disable-background-networking", "no-first-run"]
    flags += ["disable-dev-shm-usage", f"window-size={width},{height}"]
    if dark:
        flags.append("blink-settings=preferredColorScheme=0")
    for flag in flags:
        options.add_argument(f"--{flag}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    try:
        yield driver
    finally:
        driver.quit()
