"""The report and the page that follows runs, in a real browser."""

import json

import pytest
import torch

import fedquilt as fq
from fedquilt.watch import RunWatcher, create_app
from fedquilt.web.access import Access
from fedquilt.web.listen import run_in_background

HAS_FIGURES = "document.body.dataset.figures > 0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    x = torch.randn(60, 4)
    pair = x, (x.sum(1) > 0).long()
    clients = fq.make_clients(pair, test=pair, count=4, budgets=[1, 0.5, 0.25])
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    local = fq.LocalTraining(lr=0.05, epochs=1, batch_size=8)
    folder = tmp_path_factory.mktemp("runs")
    for name, method in (("wide", fq.HeteroFL(local)), ("rolling", fq.FedRolex(local))):
        cadence = fq.Cadence(evaluate_every=1)
        fq.train(net, x[:1], method, clients, 4, workers=0, out=folder / name, cadence=cadence)
    runs = [
        fq.open_run(folder / n, net, m, clients=clients)
        for n, m in (("wide", fq.HeteroFL(local)), ("rolling", fq.FedRolex(local)))
    ]
    fq.write_report(runs, folder / "report", workers=0)
    return folder


@pytest.fixture(scope="module")
def watched(folder):
    app = create_app(RunWatcher([folder]))
    with run_in_background(app, Access("127.0.0.1", None)) as address:
        yield f"{address}?run=wide&run=rolling"


@pytest.fixture
def report(folder):
    return f"file://{folder}/report/index.html"


def open_page(browser, address, width, scheme="light"):
    browser.prefer(scheme)
    browser.resize(width)
    browser.open(address)
    browser.wait(HAS_FIGURES)
    browser.wait("document.querySelectorAll('.plot svg').length == document.body.dataset.figures")


pages = pytest.mark.parametrize("which", ["report", "watched"])


@pytest.mark.browser
@pages
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_pages_are_whole_at_any_width_and_in_any_light(
    browser, check, request, which, width, scheme
):
    open_page(browser, request.getfixturevalue(which), width, scheme)
    assert len(browser.find_all(".plot svg polyline, .plot svg rect")) > 10
    check()
    browser.prefer("light")


@pytest.mark.browser
@pages
def test_plots_zoom_hide_series_and_read_values(browser, check, request, which):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    open_page(browser, request.getfixturevalue(which), 1400)
    plot = (
        "[...document.querySelectorAll('.plot')]"
        ".find(p => p.querySelector('h3').textContent === 'Training loss by round')"
    )
    browser.run(f"window.plot = {plot}; window.plot.scrollIntoView()")
    lines = "return window.plot.querySelectorAll('polyline').length"
    assert browser.run(lines) == 2
    browser.run("window.plot.querySelector('button.legend').click()")
    assert browser.run(lines) == 1
    browser.run("window.plot.querySelector('button.legend').click()")
    picture = browser.run("return window.plot.querySelector('svg')")
    ActionChains(browser.driver).move_to_element_with_offset(picture, 30, 0).perform()
    browser.wait("window.plot.querySelector('.plot-note').textContent.includes('wide:')")
    chain = ActionChains(browser.driver).move_to_element_with_offset(picture, -80, 0)
    chain.click_and_hold().move_by_offset(160, 0).release().perform()
    reset = "!window.plot.querySelector('[data-key=reset]').classList.contains('hidden')"
    browser.wait(reset)
    browser.run("window.plot.querySelector('[data-key=reset]').click()")
    browser.wait("!(" + reset + ")")
    browser.run("window.plot.querySelector('svg').focus()")
    ActionChains(browser.driver).send_keys(Keys.HOME).perform()
    browser.wait("window.plot.querySelector('.plot-note').textContent.startsWith('round 1')")
    ActionChains(browser.driver).send_keys(Keys.ARROW_RIGHT).perform()
    browser.wait("window.plot.querySelector('.plot-note').textContent.startsWith('round 2')")
    browser.run("window.plot.querySelector('details').open = true")
    browser.wait("window.plot.querySelectorAll('tbody tr').length === 4")
    check()


@pytest.mark.browser
def test_the_report_is_one_file_that_loads_nothing(browser, report):
    open_page(browser, report, 1400)
    loaded = (
        "performance.getEntriesByType('resource').filter(e => !e.name.startsWith('data:')).length"
    )
    assert browser.run(f"return {loaded}") == 0


@pytest.mark.browser
def test_the_page_follows_a_run_without_being_loaded_again(browser, check, folder, tmp_path):
    import shutil

    shutil.copytree(folder / "wide", tmp_path / "live")
    metrics = tmp_path / "live" / "metrics.jsonl"
    lines = metrics.read_text().splitlines(keepends=True)
    last = max(i for i, line in enumerate(lines) if "scores" not in json.loads(line))
    metrics.write_text("".join(lines[:last]))
    with run_in_background(create_app(RunWatcher([tmp_path])), Access("127.0.0.1", None)) as where:
        open_page(browser, where, 360)
        browser.run("window.mark = 1; document.querySelector('.plot details').open = true")
        points = "document.querySelectorAll('.plot tbody')[0].rows.length"
        browser.wait(f"{points} === 3")
        metrics.write_text("".join(lines))
        browser.wait(f"{points} === 4")
        assert browser.run("return window.mark") == 1  # the same page
        assert browser.text("#connection") == "live"
        check()
