"""Builds the documentation site into build/docs/html.

    python tools/build_docs.py            warnings are errors, links within the site are checked
    python tools/build_docs.py --quick    examples and notebooks are not run, and show no output
    python tools/build_docs.py --links    also asks the network whether pages of other sites exist

Pages are those of docs/, and pages that are made here: the API reference, the command line, the
gallery, the benchmarks.
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from docsite.assemble import assemble
from docsite.check_html import find_broken_links
from docsite.gallery import run_examples
from docsite.links import ROOT

BUILD = ROOT / "build" / "docs"


def main() -> int:
    """Assembles, builds and checks; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="do not run examples and notebooks")
    parser.add_argument("--links", action="store_true", help="check links to other sites, too")
    options = parser.parse_args()
    outputs = {} if options.quick else run_examples(BUILD / "outputs")
    source, html = BUILD / "source", BUILD / "html"
    assemble(source, outputs)
    defines = ["-D", "nb_execution_mode=off"] if options.quick else []
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-W",
        "--keep-going",
        "-q",
        "-d",
        str(BUILD / "cache"),
    ]
    status = subprocess.run([*command, *defines, str(source), str(html)]).returncode
    if status:
        return status
    broken = find_broken_links(html)
    print(
        "\n".join(broken)
        or f"wrote {html.relative_to(ROOT)}/index.html; all its links lead somewhere"
    )
    if broken or not options.links:
        return int(bool(broken))
    return subprocess.run(
        [*command, "-b", "linkcheck", str(source), str(BUILD / "links")]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())
