"""The fingerprint of a program's first call."""

from __future__ import annotations

from typing import Any

import pytest

from weft.core.ids import check_id
from weft.engine.host.call_path import fingerprint


def body(system: Any = "You plan trips.", user: str = "To Rome", **others: Any) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": system}, {"role": "user", "content": user}], **others}


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"a": 1, "b": 2}}}]


def test_programs_of_one_kind_share_it() -> None:
    """The question, the sampling and the order of keys make no difference, and it can travel as an id."""
    same = [{"function": {"parameters": {"b": 2, "a": 1}, "name": "look"}, "type": "function"}]
    assert fingerprint(body(tools=TOOLS)) == fingerprint(body(user="To Oslo", tools=same, temperature=0.3))
    check_id(fingerprint(body()), "fingerprint")


def test_another_prompt_or_other_tools_differ() -> None:
    """Each of the four bodies is of another kind."""
    kinds = [body(), body("You write code."), body(tools=TOOLS), {"messages": [{"role": "user", "content": "hi"}]}]
    assert len({fingerprint(kind) for kind in kinds}) == 4


@pytest.mark.parametrize("strange", [{}, {"messages": 7}, body(system=[{1: object()}]), body("\ud800", tools=object())])
def test_a_strange_body_has_one(strange: dict[str, Any]) -> None:
    """The request is checked elsewhere."""
    assert len(fingerprint(strange)) == 16
