"""The rules of the JSON trace event format that Perfetto's importer relies on.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any


def check(trace: dict[str, Any]) -> None:
    """Assert that a trace keeps them."""
    data = json.loads(json.dumps(trace, allow_nan=False))
    assert data["displayTimeUnit"] in ("ms", "ns")
    named = set()
    slices: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for event in data["traceEvents"]:
        track = (event["pid"], event["tid"])
        assert all(type(number) is int for number in track)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event["name"] in ("process_name", "thread_name", "process_sort_index", "thread_sort_index")
            assert list(event["args"]) == ["sort_index" if event["name"].endswith("index") else "name"]
            named.add((event["name"], *track))
            continue
        assert event["ph"] in ("X", "i", "s", "f")
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", *track) in named
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        assert isinstance(event["cat"], str)
        if event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            slices[track].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "i":
            assert event["s"] == "t"
        else:
            assert event["ph"] not in flows[event["id"]]
            assert event["ph"] == "s" or event["bp"] == "e"
            flows[event["id"]][event["ph"]] = event
    for spans in slices.values():
        check_nesting(spans)
    for pair in flows.values():
        assert sorted(pair) == ["f", "s"]
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        assert (pair["s"]["name"], pair["s"]["cat"]) == (pair["f"]["name"], pair["f"]["cat"])
        for event in pair.values():  # a flow binds to the slice around it
            spans = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in spans)


def check_nesting(spans: list[tuple[int, int]]) -> None:
    """Slices of a thread lie inside each other or apart."""
    around: list[int] = []
    for start, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], (start, end, around)
        around.append(end)
