"""A real Chromium for tests and pictures: started, looked at, and asked what went wrong in it."""

import base64
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--disable-dev-shm-usage", "--force-device-scale-factor=1"),
)
WIDTHS = (360, 1400)
AXE = Path(os.environ.get("FEDQUILT_AXE", Path(__file__).parents[1] / ".venv/axe/axe.min.js"))


def why_not() -> str | None:
    """Why there is no browser; None: there is one."""
    try:
        import selenium  # noqa: F401
    except ImportError:
        return "selenium is not installed: pip install selenium"
    for program in ("chromium", "chromedriver"):
        if shutil.which(program) is None:
            return f"{program} is not installed: apt-get install chromium chromium-driver"
    return None


@contextmanager
def open_browser(*, dark: bool = False) -> Iterator["Browser"]:
    """A browser with a new, empty profile, until the context ends."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for option in (*OPTIONS, f"--user-data-dir={profile}"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        try:
            browser = Browser(driver)
            browser.prefer("dark" if dark else "light")
            yield browser
        finally:
            driver.quit()


class Browser:
    """What tests ask of a page."""

    def __init__(self, driver):
        self.driver = driver

    def prefer(self, scheme):
        """Light or dark, as the system of a user would say."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def resize(self, width, height=900):
        """The width of the page itself, without the window around it."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def open(self, address):
        """Opens a page; what an earlier one complained about is forgotten."""
        self.driver.get("about:blank")
        self.driver.get_log("browser")
        self.driver.get(str(address))

    def find(self, selector):
        """The first element of a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def find_all(self, selector):
        """All elements of a CSS selector."""
        return self.driver.find_elements("css selector", selector)

    def text(self, selector):
        """What a reader sees of an element."""
        return self.find(selector).text

    def run(self, script, *arguments):
        """What a script returns."""
        return self.driver.execute_script(script, *arguments)

    def wait(self, script, seconds=30):
        """Waits until a JavaScript expression is true, and returns it."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.05).until(
            lambda d: self.run(f"return {script}")
        )

    def set_value(self, selector, value):
        """Moves a dial or chooses an option, as a user does."""
        self.run(
            "const e = document.querySelector(arguments[0]); e.value = arguments[1];"
            "for (const n of ['input', 'change']) e.dispatchEvent(new Event(n, {bubbles: true}));",
            selector,
            str(value),
        )

    def screenshot(self, path, *, full=True):
        """A picture of the page, down to its end."""
        more = {"captureBeyondViewport": True} if full else {}
        if full:
            size = self.run(
                "const e = document.documentElement; return [innerWidth, e.scrollHeight]"
            )
            clip = {"x": 0, "y": 0, "width": size[0], "height": size[1], "scale": 1}
            more["clip"] = clip
        picture = self.driver.execute_cdp_cmd("Page.captureScreenshot", {"format": "png", **more})
        Path(path).write_bytes(base64.b64decode(picture["data"]))

    def console_errors(self):
        """What the page complained about, and scripts that failed."""
        return [e["message"] for e in self.driver.get_log("browser") if e["level"] == "SEVERE"]

    def overflow(self):
        """Elements wider than the page, which would make a phone scroll sideways."""
        return self.run(
            "const w = document.documentElement.clientWidth;"
            "return document.documentElement.scrollWidth > w + 1 ?"
            "[...document.querySelectorAll('body *')]"
            ".filter(e => e.getBoundingClientRect().right > w + 1 && !e.closest('.scroll'))"
            ".map(e => e.tagName + '.' + e.className).slice(0, 5) : []"
        )

    def accessibility_findings(self):
        """What axe-core finds, serious and critical only; None if it is not there."""
        if not AXE.exists():
            return None
        # as an expression of the debugger: the page's own policy allows no other scripts
        self.driver.execute_cdp_cmd("Runtime.evaluate", {"expression": AXE.read_text()})
        outcome = self.driver.execute_cdp_cmd(
            "Runtime.evaluate",
            {
                "expression": "axe.run().then(r => JSON.stringify(r.violations))",
                "awaitPromise": True,
                "returnByValue": True,
            },
        )
        return [
            f"{v['id']}: {v['help']}: {[n['target'] for n in v['nodes']][:4]}"
            for v in json.loads(outcome["result"]["value"])
            if v["impact"] in ("serious", "critical")
        ]
