"""Makes the pictures of docs/ from real runs.

    python tools/screenshots.py [--runs FOLDER]

It trains small runs on the embedded digits (kept in FOLDER if that is given, and used again), opens
their pages in Chromium, and writes docs/images/. Commit the pictures if they have changed.
"""

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

import browser as driver
from fedquilt.report.runs import write_report
from fedquilt.runs.from_config import open_configured_run
from fedquilt.serve import ServedModel, create_app
from fedquilt.watch import RunWatcher
from fedquilt.watch import create_app as create_watch
from fedquilt.web.access import Access
from fedquilt.web.listen import run_in_background

IMAGES = Path(__file__).parents[1] / "docs" / "images"
WIDTH = 1200
COLORS = 128  # of a picture's palette, which keeps it small
LOCAL = Access("127.0.0.1", None)
RUNS = {
    "heterofl": "--method heterofl --rounds 20 --set run.evaluate_every=2",
    "splitmix": "--method splitmix --set method.robust=true --set method.steps=1 --rounds 6 "
    "--set local_training.epochs=1 --set local_training.lr=0.05 --set run.evaluate_every=2",
}


def train_runs(folder: Path) -> list[Path]:
    """The runs that pictures are about."""
    for name, options in RUNS.items():
        if not (folder / name / "model" / "bundle.json").exists():
            command = [sys.executable, "-m", "fedquilt", "train", "--out", str(folder / name)]
            subprocess.run([*command, *options.split()], check=True)
    return [folder / name for name in RUNS]


def take_picture(browser: driver.Browser, name: str, *, full: bool = True) -> None:
    """Writes a picture of the open page, with few colors."""
    IMAGES.mkdir(exist_ok=True)
    path = IMAGES / f"{name}.png"
    browser.screenshot(path, full=full)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLORS)
    small.save(path, optimize=True)
    print(f"wrote {path.relative_to(IMAGES.parents[1])}, {path.stat().st_size // 1000} kB")


def picture_serve(browser: driver.Browser, folder: Path) -> None:
    """The page to try a model, with its dials turned."""
    app = create_app(ServedModel.from_run(open_configured_run(folder)))
    with run_in_background(app, LOCAL) as address:
        browser.resize(WIDTH)
        browser.open(address)
        browser.wait("document.querySelectorAll('#all tbody tr').length > 0")
        browser.set_value("#dial", 1)
        browser.set_value("#robustness", 0.5)
        browser.wait("document.querySelector('#facts').textContent.includes('0.5')")
        take_picture(browser, "serve")


def picture_watch(browser: driver.Browser, folder: Path) -> None:
    """The page that follows runs, its upper part."""
    with run_in_background(create_watch(RunWatcher([folder])), LOCAL) as address:
        browser.resize(WIDTH, 1150)
        browser.open(f"{address}?run=heterofl&run=splitmix")
        browser.wait("document.body.dataset.figures > 0")
        browser.wait("document.querySelectorAll('.plot svg').length > 3")
        take_picture(browser, "watch", full=False)


def picture_report(browser: driver.Browser, folders: list[Path], out: Path) -> None:
    """A report of two runs, on a phone in the dark, scrolled to a figure."""
    page = write_report([open_configured_run(folder) for folder in folders], out, clients=False)
    browser.prefer("dark")
    browser.resize(720, 900)
    browser.open(page.as_uri())
    browser.wait("document.querySelectorAll('.plot svg').length > 3")
    browser.run("document.querySelectorAll('.plot')[3].scrollIntoView()")
    take_picture(browser, "report", full=False)
    browser.prefer("light")


def main() -> None:
    """Trains, opens, and takes pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary, driver.open_browser() as browser:
        folder = options.runs or Path(temporary) / "runs"
        runs = train_runs(folder)
        picture_serve(browser, runs[-1])
        picture_watch(browser, folder)
        picture_report(browser, runs, Path(temporary) / "report")


if __name__ == "__main__":
    main()
