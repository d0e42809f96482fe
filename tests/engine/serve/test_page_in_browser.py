"""The page in headless Chromium. Install `playwright` and a Chromium (Debian's package `chromium`) to run these."""

from __future__ import annotations

import json
import re
import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from perfetto_rules import check
from served import KEY, Served

import weft
from weft.testing import ScriptedEngine

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium"),
]
MESSAGES = [{"role": "user", "content": "Hello"}]
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


class Tab:
    """A tab of the browser, and what must not happen in it."""

    def __init__(self, browser: Any, served: Served, *, width: int = 1280, scheme: str = "light") -> None:
        self.context = browser.new_context(
            base_url=served.url, viewport={"width": width, "height": 800}, color_scheme=scheme
        )
        self.page = self.context.new_page()
        self.expect = playwright.expect
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", lambda message: self.errors.append(message.text) if message.type == "error" else None)
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self.page.on("dialog", lambda dialog: self.errors.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.requests.append(request.url))

    def open(self, address: str = "/weft") -> Any:
        """Open an address, and give the key, for which the page asks once."""
        self.page.goto(address)
        self.page.get_by_label("API key").fill(KEY)
        self.page.keyboard.press("Enter")
        return self.page

    def list_only(self, text: str) -> None:
        """Show only programs with a text, because other tests' programs fill more than one page of the list."""
        self.page.get_by_label("Show only programs with this text").fill(text)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def tab(browser: Any, served: Served) -> Iterator[Tab]:
    """A tab of which no request leaves the server, and whose console stays without errors."""
    made = Tab(browser, served)
    yield made
    made.context.close()
    assert made.errors == []
    assert [url for url in made.requests if not url.startswith((f"{served.url}/", f"blob:{served.url}/"))] == []


def ask(served: Served, program: str, max_tokens: int = 4, **headers: str) -> None:
    """Make a call of a program."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": max_tokens}
    names = {"weft-program-id": program, **headers}
    answer = served.client.post("/v1/chat/completions", json={**body, "ignore_eos": True}, headers=names)
    assert answer.status_code == 200


def test_a_program_appears_while_it_runs(tab: Tab, served: Served) -> None:
    """The row shows its state, and later that the program has ended. The replica is shown, too."""
    page = tab.open()
    tab.expect(page.locator(".replicas li")).to_contain_text("ready")
    tab.list_only("page-live")
    row = page.get_by_role("row").filter(has_text="page-live")
    seen = threading.Event()

    def ask_until_seen() -> None:
        while not seen.is_set():
            ask(served, "page-live", 1500, **{"weft-program-name": "live one"})

    with ThreadPoolExecutor(1) as other:
        asking = other.submit(ask_until_seen)
        try:
            tab.expect(row.locator("[data-name=state]")).to_have_text("running", timeout=60_000)
        finally:
            seen.set()
        asking.result()
    served.client.delete("/weft/programs/page-live")
    page.get_by_role("button", name="Ended").first.click()
    ended = page.get_by_role("table", name="Programs that have ended")
    tab.expect(ended.get_by_role("row").filter(has_text="live one")).to_contain_text(re.compile("finished.* ago"))


def test_bars_are_those_of_the_timeline(tab: Tab, served: Served) -> None:
    """A link leads to the program. Each call is a bar at its place; its waits and services are in it."""
    for _ in range(3):
        ask(served, "page/bars")
    page = tab.open()
    tab.list_only("page/bars")
    page.get_by_role("row").filter(has_text="page/bars").get_by_role("link").click()
    bars = page.locator(".call")
    tab.expect(bars).to_have_count(3)
    served.client.delete("/weft/programs/page/bars")
    tab.expect(page.locator(".title .state")).to_have_text("finished")
    made = served.client.get("/weft/programs/page/bars/timeline").json()
    for number, call in enumerate(made["calls"]):
        bar = bars.nth(number)
        left, width = bar.evaluate("bar => [parseFloat(bar.style.left), parseFloat(bar.style.width)]")
        assert left == pytest.approx(100 * call["start_s"] / made["length_s"], abs=1e-3)
        assert width == pytest.approx(100 * (call["end_s"] - call["start_s"]) / made["length_s"], abs=1e-3)
        assert bar.locator(".service").count() == len(call["services"]) == 1
        assert bar.locator(".wait").count() == len(call["waits"])
        assert ("critical" in (bar.get_attribute("class") or "")) is call["is_critical"]
    assert page.locator(".lines .critical").count() == 4  # two pieces between two calls


def test_a_shared_link_opens_the_program(tab: Tab, served: Served) -> None:
    """After the key was given. The key is kept for the tab only, and is in no address."""
    ask(served, "page-shared")
    page = tab.open("/weft#program/page-shared")
    tab.expect(page.locator(".title + .id")).to_have_text("page-shared")
    page.reload()
    tab.expect(page.locator(".call")).to_have_count(1)
    assert page.evaluate("[Object.values(sessionStorage), localStorage.length]") == [[KEY], 0]
    assert not any(KEY in url for url in (page.url, *tab.requests))


def test_hostile_names_are_text(tab: Tab, served: Served) -> None:
    """A name with markup and scripts is shown as it is, in the list and above the timeline."""
    ask(served, "page-hostile", **{"weft-program-name": HOSTILE})
    page = tab.open()
    tab.list_only("page-hostile")
    page.get_by_role("link", name=HOSTILE, exact=True).click()
    tab.expect(page.get_by_role("heading", level=1)).to_have_text(HOSTILE)
    tab.expect(page.locator(".call")).to_have_count(1)
    assert page.locator("main img, main script").count() == 0
    assert page.title().startswith("page-hostile ")


def test_the_page_refuses_markup_and_foreign_scripts(browser: Any, served: Served) -> None:
    """Even if Weft's script had a mistake: the browser itself runs nothing that a name could bring."""
    made = Tab(browser, served)
    page = made.open()
    tries = "() => { try { document.body.innerHTML = '<b>x</b>'; return 'set' } catch (error) { return error.name } }"
    assert page.evaluate(tries) == "TypeError"
    made.context.close()


def test_the_keyboard_is_enough(tab: Tab, served: Served) -> None:
    """One stop of the tabulator for all calls, between which arrow keys move. The figures of the call are shown."""
    for _ in range(2):
        ask(served, "page-keys")
    page = tab.open("/weft#program/page-keys")
    tab.expect(page.locator(".call")).to_have_count(2)
    assert page.locator(".call[tabindex='0']").count() == 1
    page.locator(".call[tabindex='0']").focus()
    page.keyboard.press("ArrowRight")
    tab.expect(page.locator(".call[aria-pressed=true]")).to_be_focused()
    tab.expect(page.locator(".details h2")).to_have_text("Call 2")
    tab.expect(page.locator(".details")).to_contain_text("4 tokens")
    page.keyboard.press("+")
    assert page.locator(".chart").evaluate("chart => chart.scrollWidth > 1.5 * chart.clientWidth")


def test_the_trace_is_downloaded(tab: Tab, served: Served, tmp_path: Path) -> None:
    """A button saves the file for Perfetto, which the server gives to the key's owner only."""
    ask(served, "page-trace")
    page = tab.open("/weft#program/page-trace")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download Perfetto trace").click()
    assert download.value.suggested_filename == "page-trace.perfetto-trace.json"
    download.value.save_as(tmp_path / "trace.json")
    check(json.loads((tmp_path / "trace.json").read_text()))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_narrow_window_needs_no_sideways_scrolling(browser: Any, served: Served, scheme: str) -> None:
    """At the width of a telephone everything of a program can be read, in both colour schemes."""
    ask(served, "page-narrow", **{"weft-program-name": "a-name-that-is-long" * 8})
    made = Tab(browser, served, width=390, scheme=scheme)
    page = made.open()
    for address, there in (("#", "tbody tr"), ("#program/page-narrow", ".call")):
        page.evaluate("hash => { location.hash = hash }", address)
        page.locator(there).first.wait_for()
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", paper))) > 384) is (scheme == "light")
    made.context.close()


def test_a_server_that_is_away_is_reported(browser: Any, served: Served) -> None:
    """What was shown stays, and the page goes on by itself when the server is back."""
    ask(served, "page-away")
    made = Tab(browser, served)
    page = made.open()
    page.locator("tbody tr").first.wait_for()
    made.context.set_offline(True)
    made.expect(page.locator("#status")).to_have_text("The server does not answer. Trying again…")
    assert page.locator("tbody tr").first.is_visible()
    made.context.set_offline(False)
    made.expect(page.locator("#status")).to_have_text("", timeout=20_000)
    made.context.close()


def test_a_wrong_key_is_asked_for_again(browser: Any, served: Served) -> None:
    """The page says so. A program that is unknown, or another key's, is reported as such."""
    made = Tab(browser, served)
    page = made.page
    page.goto("/weft#program/page-other")
    for key, expected in (("wrong", "The server does not know this key."), ("key-2", "There is no such program.")):
        page.get_by_label("API key").fill(key)
        page.get_by_role("button", name="Show my programs").click()
        made.expect(page.locator("main")).to_contain_text(expected)
    made.context.close()


def test_an_empty_list_says_how_a_program_begins(browser: Any, served: Served) -> None:
    """Nobody has used this key: the page is not a blank table."""
    made = Tab(browser, served)
    made.page.goto("/weft")
    made.page.get_by_label("API key").fill("key-2")
    made.page.keyboard.press("Enter")
    made.page.evaluate("1")
    made.expect(made.page.locator("main")).to_contain_text(re.compile("No program is open|Open programs"))
    made.context.close()


def test_tools_and_labels_are_in_the_timeline(browser: Any) -> None:
    """Of a program in process, whose engine listens, without a key. They are text, too."""
    with ScriptedEngine(["Hi", "Ho"], latency_s=1.5, listen="127.0.0.1:0") as engine, weft.Program("agent") as program:
        for label in ("plan", HOSTILE):
            engine.chat_sync({"messages": MESSAGES}, program, program.reports.start_call(object(), label=label))
            engine.programs.tool_started(program.program_id, label, f"tool of {label}")
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{engine.url}/weft")
        page.get_by_role("link", name="agent").click()
        expect = playwright.expect
        tools = page.locator(".track .tool")
        expect(tools).to_have_text(["tool of plan", f"tool of {HOSTILE}"])
        expect(page.locator(".track .label")).to_have_text(["plan", HOSTILE])
        page.locator(".call").last.click()
        expect(page.locator(".details h2")).to_have_text(HOSTILE)
        page.locator(".call").first.click()
        expect(page.locator(".details h2")).to_have_text("plan")
        assert page.title().startswith(program.program_id)
        assert page.locator(".chart [tabindex='0']").count() == 1
        page.locator(".call").last.focus()  # the tools are a lane below that of the last call
        page.keyboard.press("ArrowDown")
        expect(page.locator(".details h2")).to_have_text(re.compile("^tool of "))
        expect(page.locator(".track .tool[aria-pressed=true]")).to_be_focused()
        page.keyboard.press("End")
        expect(tools.last).to_be_focused()
        expect(page.locator(".details h2")).to_have_text(f"tool of {HOSTILE}")
        assert page.locator("main img, main script").count() == 0
        context.close()
