"""The report page in headless Chromium: table, explorer, keyboard, hostile text, colours."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from eval_bfcl.outcomes import OUTCOMES
from tests.eval_bfcl.browser import CHROMIUM, Page, chromium
from tests.eval_bfcl.five_models import EVIL


@pytest.fixture(scope="module")
def tab(made: Path) -> Iterator[Page]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine (Debian: apt-get install chromium)")
    with chromium() as opened:
        opened.open(made / "index.html")
        yield opened


ROWS = "[...document.querySelectorAll('#board tbody tr')]"


def test_the_page_says_what_its_outcomes_mean(tab: Page) -> None:
    meaning = tab.run("document.querySelector('details dl').textContent").replace("\n", " ")
    for outcome in set(OUTCOMES) - {"error", "wrong_arguments", "missing_calls", "several_calls"}:
        assert outcome.replace("_", " ") in meaning, outcome
    for phrase in ("wrong arguments", "several or missing calls"):
        assert phrase in meaning
    assert "In live_relevance such an answer is hallucinated" in meaning
    assert "counts any call as right, so the two can differ" in meaning


def test_the_page_opens_at_its_first_line(tab: Page) -> None:
    assert tab.run("document.body.scrollHeight > innerHeight")
    assert tab.run("scrollY") == 0


def test_the_list_of_questions_follows_the_selection(tab: Page) -> None:
    tab.run("document.getElementById('list').style.height = '60px'")
    try:
        tab.run("(select(visible.length - 1), 0)")
        assert tab.run("visible.length") > 2
        inside = (
            "((f, b) => b.top >= f.top - 2 && b.bottom <= f.bottom + 2)"
            "(list.getBoundingClientRect(),"
            " list.querySelector('[aria-selected=true]').getBoundingClientRect())"
        )
        assert tab.run(inside)
        assert tab.run("list.scrollTop") > 0
        tab.run("(select(0), 0)")
        assert tab.run(inside)
    finally:
        tab.run("(document.getElementById('list').style.height = '', select(0), 0)")


def test_the_leaderboard_sorts_and_filters_in_a_browser(tab: Page) -> None:
    at = "document.querySelector('th[data-column=accuracy]').cellIndex"
    first = f"{ROWS}.map(r => r.cells[{at}].firstChild.data).map(Number)"
    accuracies = tab.run(first)
    assert len(accuracies) == 10
    assert accuracies == sorted(accuracies, reverse=True)
    tab.run("document.querySelector('th[data-column=accuracy] button').click()")
    assert tab.run(first) == sorted(accuracies)
    assert tab.run("document.querySelector('th[aria-sort]').ariaSort") == "ascending"
    tab.run(
        "(s => { s.value = '0.05'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[data-filter=beta]'))"
    )
    assert tab.run(f"{ROWS}.length") == 2
    assert tab.run("document.getElementById('count').textContent") == "2 of 10 rows"
    tab.run(
        "(s => { s.value = '*'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[data-filter=beta]'))"
    )
    assert tab.run(f"{ROWS}.length") == 10


def test_paired_tests_sort_as_the_leaderboard_does(tab: Page) -> None:
    rows = "[...document.querySelectorAll('#pairs tbody tr')]"
    column = "document.querySelector('#pairs th[data-column={}]')"
    p = f"{rows}.map(r => Number(r.cells[{column.format('p')}.cellIndex].textContent))"
    given = tab.run(p)
    assert len(given) == 3 * 3 * 2
    assert tab.run("document.querySelector('#pairs th[aria-sort]')") is None  # as they were made
    for _ in range(2):
        tab.run(f"{column.format('p')}.firstChild.click()")
        direction = tab.run(f"{column.format('p')}.ariaSort")
        assert tab.run(p) == sorted(given, reverse=direction == "descending")
    assert direction == "descending"  # the smallest p came first
    tab.run(f"{column.format('rate')}.firstChild.click()")
    rates = tab.run(f"{rows}.map(r => r.cells[{column.format('rate')}.cellIndex].textContent)")
    assert rates == sorted(rates)
    assert tab.run("document.querySelector('#board th[aria-sort]').dataset.column") == "accuracy"


def test_what_scrolls_can_be_reached_and_has_a_name(tab: Page) -> None:
    found = tab.run(
        "[...document.querySelectorAll('.scroll, #raw, #prompt')]"
        ".map(e => [e.tabIndex, e.getAttribute('role'), e.ariaLabel, e.offsetParent !== null])"
    )
    names = [name for *_, name, _ in found]
    assert all(e[:2] == [0, "region"] and e[2] for e in found)
    assert len(set(names)) == len(names) == 6
    shown = {name for *_, name, visible in found if visible}
    assert shown == {"Leaderboard", "Paired tests of models", "Raw output", "Prompt"}


def test_only_the_verdict_is_read_out_when_a_question_is_chosen(tab: Page) -> None:
    live = "[...document.querySelectorAll('[aria-live]')].map(e => e.id)"
    assert tab.run(live) == ["count", "verdict"]
    tab.run("(globalThis.before = document.getElementById('verdict'), select(1), 0)")
    # The very element stays: what is put in anew is not read out.
    assert tab.run("document.getElementById('verdict') === before")
    search = (
        "(i => {{ i.value = '{}'; i.dispatchEvent(new Event('input')); }})"
        "(document.querySelector('input[type=search]'))"
    )
    tab.run(search.format("no such question"))
    assert tab.run("before.textContent") == "No question matches."
    assert tab.run("document.getElementById('detail').innerText.trim()") == "No question matches."
    tab.run(search.format(""))
    assert tab.run("before.textContent") == tab.run("visible[0].outcome.replaceAll('_', ' ')")


def test_the_explorer_shows_all_pool_seeds_or_one(tab: Page) -> None:
    options = "[...document.querySelector('select[data-qfilter=seed]').options].map(o => o.value)"
    assert tab.run(options) == ["*", "0"]
    count = tab.run("visible.length")
    first = "document.querySelector('#list li span').textContent"
    assert "seed" not in tab.run(first)
    tab.run("(ex.items.push(...ex.items.map(i => ({...i, seed: 1}))), drawList(), 0)")
    try:
        assert tab.run("visible.length") == 2 * count
        assert tab.run(first).endswith(" · seed=0")
        tab.run("(qchosen.seed = '1', drawList(), 0)")
        assert tab.run("visible.length") == count
        assert "seed" not in tab.run(first)
    finally:
        tab.run("(qchosen.seed = '*', ex.items.length /= 2, drawList(), 0)")


def test_the_explorer_answers_to_the_keyboard(tab: Page) -> None:
    choose = "(s => {{ s.value = '{}'; s.dispatchEvent(new Event('change')); }})({})"
    tab.run(choose.format("1", "document.querySelector('select[data-qfilter=k]')"))
    tab.run("document.getElementById('list').focus()")
    shown = "document.querySelector('#detail h3').textContent"
    assert tab.run(shown) == "simple_python_0"
    tab.press("ArrowDown")
    tab.press("ArrowDown")
    assert tab.run(shown) == "simple_python_2"
    tab.press("ArrowUp")
    assert tab.run(shown) == "simple_python_1"
    tab.press("End")
    assert tab.run(shown) == "simple_python_39"
    assert tab.run("document.querySelector('li[aria-selected=true] span').textContent") == (
        "simple_python_39"
    )
    tab.press("Home")
    assert tab.run("document.getElementById('prompt').textContent") == (
        "tools\nshared line\nquestion 0\n"
    )
    tab.run("document.activeElement.blur()")
    tab.press("/", "/")
    assert tab.run("document.activeElement.type") == "search"
    for letter in "area":
        tab.press(letter, letter)
    assert 0 < tab.run("document.querySelectorAll('#list li').length") < 40
    tab.run("(i => { i.value = ''; i.dispatchEvent(new Event('input')); })(document.activeElement)")
    # Every control is reached by Tab alone.
    tab.run("document.activeElement.blur(); window.scrollTo(0, 0)")
    reached = set()
    for _ in range(80):
        tab.press("Tab")
        reached.add(
            tab.run(
                "(e => e.dataset.filter || e.dataset.qfilter || e.id || e.type || e.tagName)"
                "(document.activeElement)"
            )
        )
    assert {"beta", "retriever", "button", "run", "outcome", "search", "list", "prompt"} <= reached
    tab.run("document.querySelector('th[data-column=k] button').focus()")
    tab.press("Enter", "\r")
    assert tab.run("document.querySelector('th[aria-sort]').dataset.column") == "k"


def test_hostile_outputs_stay_text_in_a_browser(tab: Page) -> None:
    tab.run(
        "(s => { s.value = 'no_call'; s.dispatchEvent(new Event('change')); })"
        "(document.querySelector('select[data-qfilter=outcome]'))"
    )
    assert tab.run("document.getElementById('raw').textContent") == EVIL
    assert tab.run("document.title") == "Tool pools on BFCL"
    assert tab.run("document.images.length") == 0


@pytest.mark.parametrize("width", [1400, 1280])
def test_the_leaderboard_fits_a_laptops_window(tab: Page, width: int) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    tab.send("Emulation.setDeviceMetricsOverride", size)
    box = "document.getElementById('board').parentElement"
    assert tab.run(f"{box}.scrollWidth - {box}.clientWidth") <= 0
    assert tab.run("document.documentElement.scrollWidth") <= width
    said = tab.run("document.getElementById('same').textContent")
    assert said == "Every row: split simple_python, pool seeds 1, n 40, errors 0, over context 0."
    assert tab.run("document.querySelector('th[data-column=split]')") is None


def test_light_and_dark_have_contrast_and_nothing_is_fetched(tab: Page) -> None:
    contrast = """(() => {
      const light = c => c.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((s, v, i) => s + v * [0.2126, 0.7152, 0.0722][i], 0);
      const paper = light(getComputedStyle(document.body).backgroundColor);
      const worst = ['h1', '.note', 'td', 'td .interval', 'th button', '.outcome', '#detail h3',
        'svg text'].map(s => document.querySelector(s)).map(e => getComputedStyle(e))
        .map(s => light(s.fill && s.fill !== 'rgb(0, 0, 0)' ? s.fill : s.color))
        .map(v => (Math.max(v, paper) + 0.05) / (Math.min(v, paper) + 0.05));
      return [paper, Math.min(...worst)];
    })()"""
    papers = {}
    for scheme in ("light", "dark"):
        tab.scheme(scheme)
        papers[scheme], worst = tab.run(contrast)
        assert worst >= 4.5, scheme
    assert papers["light"] > 0.9
    assert papers["dark"] < 0.1
    fetched = [
        e["params"]["request"]["url"]
        for e in tab.events
        if e.get("method") == "Network.requestWillBeSent"
    ]
    assert all(url.startswith("file:") and url.endswith("index.html") for url in fetched)
    errors = [e for e in tab.events if e.get("method") == "Runtime.exceptionThrown"]
    assert not errors
    narrow = {"width": 380, "height": 800, "deviceScaleFactor": 1, "mobile": True}
    tab.send("Emulation.setDeviceMetricsOverride", narrow)
    assert tab.run("document.documentElement.scrollWidth") <= 380
