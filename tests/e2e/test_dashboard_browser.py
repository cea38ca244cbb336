"""The dashboard in a headless Chromium, over the real cache with the fake model."""

from __future__ import annotations

from typing import Any

import pytest
from dashboard_tools import CELL, SYSTEM, Page, Served, open_tree

KEY = "sk-looked-at"
EVIL = "<script>window.pwned=1</script><img src=x onerror=\"window.pwned=1\"><b id='evil'>"

# What each text's contrast is to what is behind it; in a browser, since only it knows the colours.
CONTRASTS = r"""
const parts = (colour) => {
  const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  canvas.fillStyle = colour;
  canvas.fillRect(0, 0, 1, 1);
  return [...canvas.getImageData(0, 0, 1, 1).data];
};
const light = ([r, g, b]) => [r, g, b].map((v) => v / 255)
  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
  .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.textContent.trim() || !element.checkVisibility()) continue;
  if (element.closest("select, noscript, .visually-hidden, .skip")) continue;
  const inSvg = element instanceof SVGElement;
  let behind = element;
  const back = (one) => getComputedStyle(one).backgroundColor;
  while (behind && parts(back(behind))[3] < 255) behind = behind.parentElement;
  const style = getComputedStyle(element);
  const colours = [inSvg ? style.fill : style.color, back(behind ?? document.body)];
  const [a, b] = colours.map((colour) => light(parts(colour)));
  const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
  found.push([Math.round(ratio * 100) / 100, walker.currentNode.textContent.trim().slice(0, 40)]);
}
return found.sort((a, b) => a[0] - b[0]);
"""


def test_numbers_of_real_traffic_are_shown_and_only_this_server_is_asked(
    page: Page, busy: Served
) -> None:
    page.open(busy)
    for selector in (
        "#requests-rows tr",
        "#pool .stack i",
        ".chart-plot polygon",
        ".chart-plot text",
    ):
        page.until("document.querySelector(arguments[0]) !== null", selector)
    page.until_text("#model", "looked-at")
    page.until_text("#status", "serving")
    page.until_text("#reuse-value", "%")
    page.until_text("#pool-bars", "256 blocks")
    page.show("#sessions")
    page.until("document.querySelectorAll('#sessions-rows tbody tr').length === 5")
    page.show("#misses")
    page.until("document.querySelector('.miss') !== null")
    page.until("document.querySelector('#pins tbody tr') !== null")
    assert page.run("return document.querySelectorAll('.feed-note:not([hidden])').length") == 0
    assert page.console() == []
    assert page.hosts() == {f"127.0.0.1:{busy.port}"}


def test_theme_follows_the_system_until_it_is_chosen(page: Page, busy: Served) -> None:
    page.open(busy)
    background = "return getComputedStyle(document.body).backgroundColor"
    light = page.run(background)
    page.prefer("dark")
    dark = page.run(background)
    assert dark != light
    choose = (
        "const theme = document.querySelector('#theme'); theme.value = arguments[0];"
        "theme.dispatchEvent(new Event('change'))"
    )
    page.run(choose, "light")
    assert page.run(background) == light
    page.open(busy)
    assert page.run(background) == light
    page.run(choose, "auto")
    assert page.run(background) == dark


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_all_text_can_be_read(page: Page, busy: Served, theme: str) -> None:
    page.prefer(theme)
    for colour in ("age", "hits"):
        open_tree(page, busy)
        page.click(f"#tree-colour [data-colour={colour}]")
        page.show("#misses")
        page.until("document.querySelector('.miss mark') !== null")
        worst = page.run(CONTRASTS)
        assert len(worst) > 150
        assert [one for one in worst if one[0] < 4.5] == []


def test_phone_needs_no_sideways_scrolling(page: Page, busy: Served) -> None:
    page.screen(390, 844, mobile=True)
    open_tree(page, busy)
    for section in ("#requests", "#pool", "#misses", "#sessions"):
        page.show(section)
        page.until(
            "document.querySelector(`${arguments[0]} :is(td, .miss, .stack)`) !== null", section
        )
    assert page.run("return document.documentElement.scrollWidth") == 390
    over = page.run(
        "return [...document.querySelectorAll('main *')].filter((one) => one.checkVisibility() &&"
        " !one.closest('.scroll, pre, .tree-picture, .visually-hidden, thead, nav') &&"
        " one.getBoundingClientRect().right > 391).map((one) => one.outerHTML.slice(0, 80))"
    )
    assert over == []


def test_key_is_asked_for_sent_and_forgotten(page: Page) -> None:
    with Served(api_key=KEY) as served:
        served.headers = {"Authorization": f"Bearer {KEY}"}
        served.chat("Be brief.", "Hello there, how are you today?")
        page.open(served)
        page.until("!document.querySelector('#key-form').hidden")
        assert "needs the API key" in page.text("#requests")
        answer = (
            "document.querySelector('#key-input').value = arguments[0];"
            "document.querySelector('#key-form').requestSubmit()"
        )
        page.run(answer, "wrong")
        page.until_text("#key-note", "valid API key")
        page.run(answer, KEY)
        page.until("document.querySelector('#requests-rows tr') !== null")
        page.until_text("#reuse-note", "since the start")
        assert page.run("return document.querySelector('#key-form').hidden")
        assert KEY not in page.run("return document.documentElement.outerHTML + location.href")
        page.open(served)  # the tab remembers
        page.until("document.querySelector('#requests-rows tr') !== null")
        page.click("#key-forget")
        page.until("!document.querySelector('#key-form')?.hidden")
        assert page.run("return sessionStorage.length") == 0
        assert ("/admin/cache", f"Bearer {KEY}") in served.asked
        assert not any(key for path, key in served.asked if path.startswith("/admin/assets"))


def test_what_is_shown_is_called_stale_while_the_server_is_down(page: Page) -> None:
    with Served() as served:
        served.chat("Be brief.", "Hello there, how are you today?")
        page.open(served)
        page.until("document.querySelector('#requests-rows tr') !== null")
        page.until_text("#status", "serving")
        served.stop()
        page.until_text("#stale", "stale since")
        page.until("document.querySelector('#requests-rows.is-stale') !== null")
        page.until_text("[data-note=requests]", "can't be reached")
        assert "chatcmpl" in page.text("#requests-rows")
        served.start()
        page.until_text("#status", "serving")
        page.until("document.querySelector('#stale').hidden")
        page.until("document.querySelector('.is-stale') === null")
        page.until("document.querySelector('.chart-restart') !== null")
        page.until_text("#requests-rows", "No request has ended yet.")


def test_texts_of_prompts_never_become_markup(page: Page) -> None:
    row: dict[str, Any] = dict.fromkeys(
        ("id", "api", "model", "namespace", "tenant", "session_id", "finish_reason"), EVIL
    )
    request = row | {"state": "finished", "prompt_tokens": 9, "cached_tokens": 3}
    request |= {"output_tokens": 2, "queue_s": 0.1, "ttft_s": 0.2, "itl_s": 0.1, "total_s": 1.0}
    session = row | {"turns": 1, "tokens": 9, "cached_tokens": 3, "private_blocks": 1, "bytes": 9}
    stubs = {
        "/admin/requests": {"live": [], "recent": [request]},
        "/admin/sessions": {"object": "list", "data": [session], "total": 1},
    }
    with Served(stubs) as served:
        served.chat(EVIL * 3, "a", cache_salt=EVIL)
        served.chat(EVIL * 2 + "0" + EVIL * 2, "b", cache_salt=EVIL)
        page.open(served).show("#tree")
        page.until(f"document.querySelectorAll('{CELL}').length > 3")
        page.click(f"{CELL}.run")
        page.until_text("#tree-facts", "<script>")
        page.show("#misses")
        page.until_text("#misses-list", "<script>")
        page.show("#sessions")
        page.until_text("#sessions-rows", "<script>")
        page.until_text("#requests-rows", "<script>")
        page.until_text("#namespaces", "%3Cscript%3E")
        assert page.run("return window.pwned") is None
        assert (
            page.run("return document.querySelectorAll('main img, main script, #evil').length") == 0
        )
        assert page.console() == []


def test_a_missing_route_leaves_a_reason_in_its_section(page: Page) -> None:
    with Served({"/admin/sessions": None, "/admin/timeline": None}) as served:
        served.chat("Be brief.", "Hello there, how are you today?")
        page.open(served)
        page.until_text("[data-note=timeline]", "doesn't have it")
        page.until("document.querySelector('#requests-rows tr') !== null")
        page.show("#sessions")
        page.until_text("[data-note=sessions]", "There is no /admin/sessions")
        assert page.text("#status") == "serving"


def test_trouble_is_named_first(page: Page) -> None:
    engine = {"state": "dead", "accepting": False, "seconds_in_step": 0.0}
    engine |= {"num_running": 0, "num_waiting": 2}
    with Served({"/health": {"status": "dead", "engine": engine}}) as served:
        page.open(served)
        page.until_text("#concerns li.bad", "The engine has failed")
        assert page.text("#status") == "engine failed"
        assert page.driver.title == "(1) RadixKV"
        served.stubs["/health"] = {"status": "ok", "engine": {**engine, "state": "idle"}}
        page.until_text("#concerns.calm", "Nothing needs attention.")
        assert page.driver.title == "RadixKV"


def test_numbers_change_while_somebody_looks(page: Page) -> None:
    with Served() as served:
        page.open(served)
        page.until_text("#requests-rows", "No request has ended yet.")
        page.until_text("#reuse-note", "no prompt in this time")
        for _ in range(2):
            served.chat("Be brief, and polite.", "Hello there, how are you today?")
        page.until_text("#requests-rows", "chatcmpl")
        page.until_text("#reuse-value", "49 %")
        page.click("#pause")
        served.chat("Be brief, and polite.", "Something else is asked now.")
        asked = len(served.asked)
        page.run("return new Promise((done) => setTimeout(done, 600))")
        assert len(served.asked) <= asked + 2  # what was on its way
        page.click("#pause")
        page.until("document.querySelectorAll('#requests-rows tbody tr').length === 3")


def test_a_miss_is_explained_in_words_with_both_texts(page: Page, busy: Served) -> None:
    page.open(busy).show("#misses")
    page.until("document.querySelector('.miss mark') !== null")
    page.run(
        "for (const miss of document.querySelectorAll('.miss'))"
        " miss.open = miss.textContent.includes('date or a time')"
    )
    assert "a date or a time" in page.text(".miss[open] .advice")
    marks = page.run(
        "return [...document.querySelectorAll('.miss[open] mark')].map((m) => m.innerText)"
    )
    # No more is marked than what differs: after it both go on alike.
    assert marks in (["2-01 00:00:01", other] for other in ("1-30 23:59:59", "1-29 23:59:58"))
    assert "1 more like it" in page.text(".miss[open] summary")
    assert "These 2 requests computed" in page.text(".miss[open] .miss-body")
    page.click("#misses-filter [data-filter=all]")
    page.until("document.querySelectorAll('#misses-list .miss').length > 4")


def test_a_prompt_is_looked_up_without_being_run(page: Page, busy: Served) -> None:
    page.open(busy)
    before = len(busy.asked)
    page.run(
        "document.querySelector('#try-chat').checked = false;"
        "document.querySelector('#try-text').value = arguments[0];"
        "document.querySelector('#try-form').requestSubmit()",
        "<|im_start|>system\n" + SYSTEM.format("midnight"),
    )
    page.until_text("#explain-answer", "tokens reused")
    page.until_text("#explain-answer mark", "midnight")
    assert ("/admin/cache/explain", "") in busy.asked[before:]
    page.run(
        "document.querySelector('#explain-id').value = 'nobody/knows';"
        "document.querySelector('#explain-form').requestSubmit()"
    )
    page.until_text("#explain-answer", "There is no explanation")


def test_charts_are_read_with_the_keyboard_and_as_a_table(page: Page, busy: Served) -> None:
    page.open(busy)
    page.until("document.querySelector('.chart-plot polygon') !== null")
    page.run("document.querySelector('.chart-plot').focus()")
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.press(key)
    assert page.run("return document.querySelectorAll('.chart-cursor.on').length") == 6
    times = set(
        page.run("return [...document.querySelectorAll('.chart-when')].map((w) => w.innerText)")
    )
    assert len(times) == 1
    assert ":" in times.pop()
    page.press("Escape")
    assert page.run("return document.querySelectorAll('.chart-cursor.on').length") == 0
    page.click("#charts-table summary")
    page.until("document.querySelectorAll('.numbers tbody tr').length === 12")


def test_what_prompts_differ_in_is_named_only_if_it_is_likely(page: Page, busy: Served) -> None:
    cases = [
        ("It is 2026-1", "2-01 00:00:01.", "1-30 23:59:59.", "a date or a time"),
        ("It is 2026-11-30 23:08:", "52.", "09.", "a date or a time"),
        ("Today is ", "Tuesday", "Monday", "a date or a time"),
        ("Session 3f2a9c41", "7d0e55aa", "99b1c2d3", "an id"),
        ("Order number ", "77", "912", "a number"),
        ("Be brief.", "\n\nHello there", " Hello there", "white space"),
        ("You are ", "Helpful", "helpful", "upper and lower case"),
        ("I have 5 questions. ", "Where is it?", "What is it?", None),
        ("", "Answer in 3 words", "Please be brief", None),
    ]
    page.open(busy)
    script = (
        "return import('/admin/assets/texts.js').then((t) =>"
        " arguments[0].map(([before, one, other]) => t.kindOfDifference(before, one, other)));"
    )
    assert page.run(script, cases) == [kind for *_, kind in cases]
