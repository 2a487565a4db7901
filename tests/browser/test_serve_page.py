"""The page to try a model, in a real browser: a moved dial changes the answer."""

import pytest
import torch

import fedquilt as fq
from fedquilt.serve import ServedModel, create_app
from fedquilt.web.access import Access
from fedquilt.web.listen import run_in_background

HAS_ANSWERS = "document.querySelectorAll('#all tbody tr').length > 0"
FACTS = "document.querySelector('#facts').textContent"


@pytest.fixture(scope="module")
def address():
    """Split-Mix on a part of the digits: two dials."""
    digits = fq.load_dataset("digits")
    part = digits.train.select(torch.arange(200))
    clients = fq.make_clients(part, count=2, budgets=(1.0, 0.5))
    model = torch.nn.Sequential(
        *(torch.nn.Conv2d(1, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()),
        *(torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)),
    )
    local = fq.LocalTraining(epochs=3, lr=0.1, batch_size=32)
    method = fq.SplitMix(local, base=0.25, robust=True, epsilon=0.5, steps=1)
    run = fq.train(model, digits.example, method, clients, 1, workers=0)
    app = create_app(ServedModel.from_run(run))
    with run_in_background(app, Access("127.0.0.1", None)) as where:
        yield where


def open_page(browser, address, width):
    browser.resize(width)
    browser.open(address)
    browser.wait(HAS_ANSWERS)


def test_a_moved_dial_changes_the_answer_and_its_cost(browser, check, address):
    open_page(browser, address, 360)
    before = browser.run(f"return {FACTS}")
    sure = browser.text("#confidence")
    browser.set_value("#dial", 0)
    browser.wait(f"{FACTS} !== {before!r}")
    assert browser.text("#dial-value") == "0.25"
    assert browser.text("tr.chosen th") == "0.25"
    assert browser.text("#confidence") != sure
    check()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1400])
def test_the_page_is_whole_at_any_width_and_in_any_light(browser, check, address, width, scheme):
    browser.prefer(scheme)
    open_page(browser, address, width)
    drawn = "document.querySelector('#seen').getContext('2d').getImageData(0, 0, 8, 8).data"
    assert browser.run(f"return Math.max(...[...{drawn}].filter((_, i) => i % 4 === 0))") > 100
    assert len(browser.find_all("#bars .class-row")) == 10
    check()
    browser.prefer("light")


@pytest.mark.browser
def test_the_robustness_dial_and_the_limits_choose_other_points(browser, check, address):
    open_page(browser, address, 1400)
    sure = browser.text("#confidence")
    browser.set_value("#robustness", 1)
    browser.wait(f"document.querySelector('#confidence').textContent !== {sure!r}")
    for limit in ("params", "macs", "latency"):
        browser.set_value("#by", limit)
        browser.set_value("#dial", 0)
        browser.wait("document.querySelector('tr.chosen th').textContent === '0.25'")
        browser.set_value("#dial", 100)
        browser.wait("document.querySelector('tr.chosen th').textContent === '1'")
    check()


@pytest.mark.browser
def test_one_can_draw_with_the_keyboard_and_with_a_pointer(browser, check, address):
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    open_page(browser, address, 1400)
    browser.find("#clear").click()
    canvas = browser.find("#draw")
    ink = (
        "document.querySelector('#draw').getContext('2d').getImageData(0, 0, 280, 280).data"
        ".reduce((sum, v, i) => sum + (i % 4 === 0 && v > 128 ? 1 : 0), 0)"
    )
    assert browser.run(f"return {ink}") == 0
    chain = ActionChains(browser.driver)
    chain.move_to_element(canvas).click_and_hold().move_by_offset(40, 40).release().perform()
    by_pointer = browser.run(f"return {ink}")
    assert by_pointer > 500
    browser.run("document.querySelector('#draw').focus()")
    keys = ActionChains(browser.driver).key_down(Keys.SPACE)
    for _ in range(6):
        keys = keys.send_keys(Keys.ARROW_UP)
    keys.key_up(Keys.SPACE).perform()
    assert browser.run(f"return {ink}") > by_pointer + 500
    check()


@pytest.mark.browser
def test_an_upload_is_answered_and_a_broken_one_gets_a_sentence(browser, address, tmp_path):
    from PIL import Image

    open_page(browser, address, 360)
    good, bad = tmp_path / "good.png", tmp_path / "bad.png"
    Image.new("RGB", (50, 40), (250, 250, 250)).save(good)
    bad.write_bytes(b"not an image")
    browser.find("#mode-upload").click()
    sure = browser.text("#confidence")
    browser.find("#file").send_keys(str(good))
    browser.wait(f"document.querySelector('#confidence').textContent !== {sure!r}")
    browser.find("#file").send_keys(str(bad))
    browser.wait("document.querySelector('#problem').textContent.includes('not a readable PNG')")
    assert all("400" in line for line in browser.console_errors())  # what the network says


@pytest.mark.browser
def test_the_api_page_is_usable_and_loads_nothing_from_elsewhere(browser, check, address):
    for width in (360, 1400):
        browser.resize(width)
        browser.open(f"{address}docs")
        assert "/predict" in browser.text("main")
        hosts = "performance.getEntriesByType('resource').map(e => new URL(e.name).host)"
        assert set(browser.run(f"return {hosts}")) <= {address.split("/")[2]}
        check()
