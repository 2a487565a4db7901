import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import browser as driver


@pytest.fixture(scope="session")
def browser():
    reason = driver.why_not()
    if reason is not None:
        pytest.skip(f"no browser: {reason}")
    with driver.open_browser() as opened:
        yield opened


@pytest.fixture
def check(browser):
    """Looks at the page that is open: nothing failed, nothing is cut off, all can use it."""

    def look():
        assert browser.console_errors() == []
        assert browser.overflow() == []
        findings = browser.accessibility_findings()
        assert findings in (None, []), findings

    return look
