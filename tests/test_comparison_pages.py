"""Tables of comparisons on pages are those of the stored results, and not typed by hand."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import write_comparison  # noqa: E402
import write_defences  # noqa: E402


@pytest.mark.parametrize("page", write_comparison.PAGES)
def test_the_table_on_the_page_is_that_of_the_results_file(page):
    text = (ROOT / page).read_text()
    assert write_comparison.BLOCK.search(text)
    assert write_comparison.update_page(page, text) == text, "run python tools/write_comparison.py"


@pytest.mark.parametrize(("name", "path"), write_comparison.RESULTS.items())
def test_results_name_how_they_were_measured_and_no_machine(name, path):
    text = (ROOT / path).read_text()
    assert len(text) < 100_000
    assert "/tmp" not in text
    assert "/work" not in text
    about = write_comparison.load_comparison(name).about
    assert (ROOT / about["file"]).is_file()
    assert about["seeds"]
    assert about["made_by"]["commit"]


def test_tables_of_privacy_and_hostile_clients_are_those_of_the_stored_runs():
    text = write_defences.PAGE.read_text()
    assert {match[2] for match in write_defences.BLOCK.finditer(text)} == {*write_defences.WRITERS}
    assert write_defences.update_page(text) == text, "run python tools/write_defences.py"
