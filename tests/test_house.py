"""How big the tree is, how many hops a call makes in it, and that the page of a call's life tells the truth."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from house import Hops, Trail, hops_of_a_call, hops_of_an_end, size

import weft

pytest.importorskip("langchain", reason="the LangChain extra is not installed")

from scheduler_harness import SchedulerHarness

from weft.integrations.langchain import ChatWeft

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "one-call.md"
AT_MOST = {
    "lines": 58_345,
    "files": 347,
    "most_files_in_a_folder": 12,
    "class_names_used_twice": 0,
    "module_names_used_three_times": 0,
    "files_that_spell_kv_policy": 7,
    "files_that_define_program_ended": 10,
}


def test_the_tree_does_not_grow_unseen() -> None:
    """Who adds files or lines takes others away, or raises a figure here, where a reviewer sees it."""
    found = size()._asdict()
    assert {name: found[name] for name, most in AT_MOST.items() if found[name] > most} == {}


def test_a_call_makes_few_hops() -> None:
    """Counts of files, of calls and of changes of file, from `ChatWeft.invoke` to vLLM and back. Two threads take turns
    after the answer, so changes of file differ by one or two from run to run."""
    before, after = hops_of_a_call()
    assert before.within(Hops(files=22, calls=146, changes_of_file=63))
    assert after.within(Hops(files=20, calls=91, changes_of_file=40))


def test_the_end_of_a_call_makes_few_hops_in_the_scheduler() -> None:
    """With host memory, the step in which a call ends also decides what is kept of its KV."""
    assert hops_of_an_end().within(Hops(files=29, calls=119, changes_of_file=74))


@pytest.mark.engine
def test_a_call_passes_the_places_that_the_page_names(engine: weft.Engine, tmp_path: Path) -> None:
    """The page names a function and a file in each of its lines, in the order in which a call meets them."""
    trail = Trail()

    async def listen() -> None:
        sys.setprofile(trail.note)  # this thread runs already

    async def stop() -> None:
        sys.setprofile(None)

    with weft.Program("page") as program:
        model = ChatWeft(engine=engine, max_tokens=2)
        engine.submit(listen()).result()
        try:
            with trail.listening():
                trail.is_on = True
                model.invoke("Hello", program.config())
                trail.is_on = False
        finally:
            engine.submit(stop()).result()
    scheduler = Trail()
    with scheduler.listening():
        harness = SchedulerHarness(tmp_path, {"name": "auto"})
        scheduler.is_on = True
        harness.add("c", max_tokens=1)
        harness.run()
        scheduler.is_on = False
    at = next(place for place, each in enumerate(trail.called) if each == ("engine/vllm/chat.py", "complete")) + 1
    called = [*trail.called[:at], *scheduler.called, *trail.called[at:]]
    assert len(places(PAGE.read_text())) == 10
    for file, function in places(PAGE.read_text()):
        assert (file, function) in called, f"{function} of {file} is not called after the places before it"
        called = called[called.index((file, function)) + 1 :]


def places(page: str) -> list[tuple[str, str]]:
    """The functions that the page's numbered lines name, each with its file: the one that the line names."""
    found = []
    for line in re.findall(r"^\d\. .*?(?=^\d\. |^$)", page, re.MULTILINE | re.DOTALL):
        (file,) = re.findall(r"`([\w/]+\.py)`", line)
        found += [(file, name) for name in re.findall(r"`([a-z_]+)`", line) if name != "vllm_xargs"]
    return found
