"""The list of the page in headless Chromium, with states of many programs that a scripted engine's page is given."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

import weft
from weft.core.show import LiveProgram, LiveReplica, LiveState, to_json
from weft.testing import ScriptedEngine

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
PLAIN = LiveProgram(
    program_id="p", name="agent", session_id="", tenant=None, state="idle", tools=(), level=None, threads=1, calls=1,
    calls_in_flight=0, prompt_tokens=1, output_tokens=1, service_s=0.1, wait_s=0.1, tools_s=0.0, kv_tokens=None,
    preemptions=0, engine_ids=("engine-0",), age_s=1.0, due_in_s=None, parent_program_id=None,
)  # fmt: skip
REPLICA = LiveReplica("engine-0", "tiny", "ready", 3, 40, 43, 0, 0.5)


def some(number: int, **changes: Any) -> list[LiveProgram]:
    """Programs that differ in their ids and in their service."""
    return [replace(PLAIN, program_id=f"p-{n:03}", service_s=float(n), **changes) for n in range(number)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine(["Hi"], listen="127.0.0.1:0") as engine:
        yield engine


@contextmanager
def shown(
    browser: Any,
    engine: ScriptedEngine,
    programs: list[LiveProgram],
    ended: list[LiveProgram] | None = None,
    width: int = 1280,
) -> Iterator[Any]:
    """The list of these programs, in a tab that must stay without errors."""
    state = to_json(LiveState(0.0, "tiny", "auto", (REPLICA,), tuple(programs), len(programs), tuple(ended or ())))
    context = browser.new_context(viewport={"width": width, "height": 844})
    page = context.new_page()
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("dialog", lambda dialog: errors.append(f"dialog {dialog.message}"))
    page.route("**/weft/state", lambda route: route.fulfill(json=state))
    page.goto(f"{engine.url}/weft")
    page.locator(".list").wait_for()
    yield page
    context.close()
    assert errors == []


def ids(page: Any) -> list[str]:
    """Of the programs that are shown, in their order."""
    found: list[str] = page.locator("table:visible tbody .id").evaluate_all("all => all.map(each => each.textContent)")
    return found


@pytest.mark.parametrize(("width", "rows", "most_pixels"), [(1280, 50, 2_200), (390, 25, 2_600)])
def test_three_hundred_programs_are_shown_in_pages(
    browser: Any, engine: ScriptedEngine, width: int, rows: int, most_pixels: int
) -> None:
    """All of them at once were 54,000 pixels high on a telephone. No program is left out, and none is on two pages."""
    with shown(browser, engine, some(300), width=width) as page:
        assert page.evaluate("document.documentElement.scrollHeight") < most_pixels
        assert page.evaluate("document.documentElement.scrollWidth") == width
        seen = ids(page)
        assert len(seen) == rows
        for number in range(1, 300 // rows):
            page.get_by_role("button", name="Next").click()
            playwright.expect(page.locator(".pager")).to_contain_text(
                f"{number * rows + 1}\u2013{(number + 1) * rows} of 300"
            )
            seen += ids(page)
        assert sorted(seen) == [f"p-{n:03}" for n in range(300)]
        assert page.get_by_role("button", name="Next").is_disabled()


def test_the_cards_of_a_telephone_are_aligned(browser: Any, engine: ScriptedEngine) -> None:
    """Each figure stands below the same figure of the card above, whatever the cards have; a card has three lines."""
    programs = [*some(3), replace(PLAIN, program_id="x" * 90, name="n" * 90, state="tool", tools=("t" * 90,), place=3)]
    with shown(browser, engine, programs, width=390) as page:
        places = page.locator("tbody tr").evaluate_all(
            "rows => rows.map(row => [...row.cells].filter(cell => cell.offsetWidth).map(cell => "
            "[cell.dataset.name, cell.offsetLeft, cell.offsetWidth]))"
        )
        assert len(places) == 4
        assert places == [places[0]] * 4
        assert [name for name, *_ in places[0]] == ["program", "state", "queue", "service", "wait", "calls"]
        assert page.locator("tbody tr").evaluate_all("rows => rows.every(row => row.offsetHeight < 80)")


def test_a_heading_orders_and_turns_the_order_round(browser: Any, engine: ScriptedEngine) -> None:
    """As in `weft top`: the largest first, then the smallest. A screen reader is told."""
    with shown(browser, engine, some(3)) as page:
        service = page.get_by_role("columnheader", name="Service")
        for direction, expected in (("descending", [2, 1, 0]), ("ascending", [0, 1, 2])):
            service.get_by_role("button").click()
            assert service.get_attribute("aria-sort") == direction
            assert ids(page) == [f"p-{n:03}" for n in expected]


def test_a_narrow_window_orders_by_a_menu(browser: Any, engine: ScriptedEngine) -> None:
    """Where no heading is shown."""
    with shown(browser, engine, some(3), width=390) as page:
        page.get_by_label("Order", exact=True).select_option("service")
        assert ids(page) == ["p-002", "p-001", "p-000"]
        page.get_by_role("button", name="Turn the order round").click()
        assert ids(page) == ["p-000", "p-001", "p-002"]


@pytest.mark.parametrize("text", ["Needle", "needle-7", "a needle", "in needle", "tenant needle", "engine-needle"])
def test_the_filter_finds_what_weft_top_finds(browser: Any, engine: ScriptedEngine, text: str) -> None:
    """Names, ids, sessions, tools, tenants and replicas, in any case. The slash goes to it, and Escape shows all."""
    found = replace(
        PLAIN, program_id="needle-7", name="A Needle", session_id="needle", state="tool", tools=("needle",),
        tenant="tenant needle", engine_ids=("engine-needle",),
    )  # fmt: skip
    with shown(browser, engine, [*some(60), found]) as page:
        page.keyboard.press("/")
        page.keyboard.type(text)
        assert ids(page) == ["needle-7"]
        page.keyboard.press("Escape")
        assert len(ids(page)) == 50


def test_a_state_is_a_filter_with_its_count(browser: Any, engine: ScriptedEngine) -> None:
    """Each shows how many programs are in it; a second click shows all again."""
    programs = [*some(2, state="waiting"), replace(PLAIN, program_id="only", state="running")]
    with shown(browser, engine, programs) as page:
        chip = page.get_by_role("button", name="running")
        playwright.expect(chip).to_have_text("running1")
        chip.click()
        assert ids(page) == ["only"]
        chip.click()
        assert len(ids(page)) == 3


def test_programs_that_have_ended_show_their_end(browser: Any, engine: ScriptedEngine) -> None:
    """How, and how long ago; the newest first."""
    ended = [
        replace(PLAIN, program_id="new", state="failed", ended_ago_s=12.0),
        replace(PLAIN, program_id="old", state="finished", ended_ago_s=125.0),
    ]
    with shown(browser, engine, [], ended) as page:
        playwright.expect(page.get_by_role("heading", level=1)).to_have_text("Programs")
        page.get_by_role("button", name="Ended 2").click()
        table = page.get_by_role("table", name="Programs that have ended")
        assert ids(page) == ["new", "old"]
        assert table.locator("td[data-name=state]").all_text_contents() == ["failed", "finished"]
        assert table.locator("td[data-name=ended]").all_text_contents() == ["12.0 s ago", "2 min 5 s ago"]


def test_hostile_texts_are_text_in_every_column(browser: Any, engine: ScriptedEngine) -> None:
    """Names, ids, tools, tenants and replicas with markup and scripts."""
    hostile = replace(
        PLAIN, program_id=HOSTILE, name=HOSTILE, state="tool", tools=(HOSTILE,), tenant=HOSTILE, engine_ids=(HOSTILE,)
    )
    with shown(browser, engine, [hostile], [replace(hostile, ended_ago_s=1.0)], width=1600) as page:
        for button in ("Open 1", "Ended 1"):
            page.get_by_role("button", name=button).click()
            row = page.locator("table:visible tbody tr")
            assert row.locator("a").text_content() == HOSTILE
            for name, text in (("state", f"in {HOSTILE}"), ("tenant", HOSTILE), ("replica", HOSTILE)):
                assert row.locator(f"[data-name={name}]").text_content() == text
        assert page.locator("main img, main script").count() == 0
        assert page.title() == "Weft"


@pytest.mark.parametrize("width", [1600, 1280, 1061, 800, 390])
def test_long_figures_and_names_stay_in_the_table(browser: Any, engine: ScriptedEngine, width: int) -> None:
    """A program that is long at everything moves no figure out of its column, and takes one line there."""
    long = replace(
        PLAIN, program_id="p" * 200, name="n" * 200, state="tool", tools=("t" * 200,), level=3, calls=123_456,
        calls_in_flight=99, service_s=3599.0, wait_s=3599.0, kv_tokens=1_234_567, tenant="t" * 200,
        engine_ids=tuple(f"engine-0/{n}" for n in range(8)), age_s=3599.0,
    )  # fmt: skip
    with shown(browser, engine, [long], width=width) as page:
        outside = "cells => cells.filter(cell => cell.scrollWidth > cell.clientWidth).map(cell => cell.dataset.name)"
        assert page.locator("tbody td").evaluate_all(outside) == []
        assert page.locator("td[data-name=replica]").text_content() == "engine-0/0 and 7 more"
        assert page.locator("td[data-name=state]").evaluate("cell => cell.offsetHeight") < 40


def test_a_program_is_ended_after_a_question(browser: Any, engine: ScriptedEngine) -> None:
    """Like `x` in `weft top`: "Leave it" leaves it, and "End it" ends it."""
    with weft.Program("doomed") as program:
        body = {"messages": [{"role": "user", "content": "Hello"}]}
        engine.chat_sync(body, program, program.reports.start_call(object()))
        with shown(browser, engine, []) as page:
            page.goto(f"{engine.url}/weft#program/{program.program_id}")
            for answer, state in (("Leave it", "idle"), ("End it", "cancelled")):
                page.get_by_role("button", name="End program").click()
                playwright.expect(page.locator("dialog p")).to_contain_text(f"End doomed ({program.program_id})?")
                page.get_by_role("button", name=answer).click()
                playwright.expect(page.locator(".title .state")).to_have_text(state)
            playwright.expect(page.get_by_role("button", name="End program")).to_be_hidden()
