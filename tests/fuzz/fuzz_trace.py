"""Any bytes in a file are a trace or a graph, or a `TraceError` with a short message."""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Final

from perfetto_rules import check

from weft.core.errors import TraceError
from weft.core.show.perfetto import perfetto
from weft.core.show.recorded import recorded
from weft.core.trace.format import dump, path_tokens, read, write
from weft.core.trace.workloads import chat
from weft.views.graph import load

_FOLDER: Final = tempfile.TemporaryDirectory()
_FILE: Final = Path(_FOLDER.name, "trace.jsonl")
_AGAIN: Final = Path(_FOLDER.name, "again.jsonl")


def one_input(data: bytes) -> None:
    """Read a file in every way that Weft reads one. A trace that was read is the same after it is written again."""
    _FILE.write_bytes(data)
    for reader in (read, load):
        try:
            found = reader(_FILE)
        except TraceError as error:
            found, message = None, str(error)
        if found is None:
            assert len(message) < 1000
        elif reader is read:
            write(found, _AGAIN)
            assert read(_AGAIN) == found
            assert all(path_tokens(program.calls) > 0 for program in found)
            with suppress(TraceError):  # it does not say when calls ran
                check(perfetto([(recorded(program), program.arrival_s) for program in found]))


def seeds() -> list[bytes]:
    """Files of each kind, and the mistakes that people make in them."""
    rows = [
        {"id": "a", "output_tokens": 4},
        {"id": "b", "parents": ["a"], "output_tokens": 1, "prompt_tokens": 9, "gap_s": 0.5, "tool": "search"},
        {"id": "c", "parents": ["a", "b"], "output_tokens": 2, "prompt_tokens": 9, "shared_prefix_tokens": 3},
    ]
    whole = {"version": 1, "program": "p", "arrival_s": 1.5, "name": "n", "tenant": "t", "calls": rows}
    wrong = [
        {"program": "p", "calls": [{"id": "a", "parents": ["b"], "output_tokens": 1}]},
        {"program": "p", "calls": [{"id": "a", "output_tokens": 0}]},
        {"program": "p" * 2000, "calls": []},
        {"program": "p", "calls": [{"id": "i" * 2000, "output_tokens": 1, "parents": ["q" * 2000]}]},
        {"program": "p", "arrival_s": 10**400, "calls": rows},
        {"program": "\ud800", "calls": [{"id": "\ud800", "output_tokens": 10**400}]},
        {"version": 2},
        {
            "program": "p",
            "calls": [{"id": "a", "output_tokens": 1, "measured": {"thread": "0", "waits": [[0, 1], [2]]}}],
        },
        {"calls": [], "more": 1},
        [whole],
        7,
    ]
    account = {"service_s": 0.1, "wait_s": 0.0, "preemptions": 0, "swapped_tokens": 0, "recomputed_tokens": 0}
    tokens = {"prompt_tokens": 3, "output_tokens": 2, "cached_tokens": 0}
    times = {"arrival_s": 0.0, "completion_s": 1.0}
    call = {"call_id": "c", "thread_id": "t", "label": "", "state": "finished", "parents": [], "tools": ["x"]}
    graph = {
        "format": "weft-program-graph",
        "version": 1,
        "program": {"program_id": "p", "session_id": "s", "name": "n"},
        "calls": [{**call, **times, **account, **tokens}],
    }
    times = {"thread": "0", "arrival_s": 1.0, "end_s": 4.5, "wait_s": 1, "service_s": 2, "waits": [[0, 0.5], [2, 0.5]]}
    timed = [{"id": name, "output_tokens": 1, "parents": [], "measured": times} for name in "ab"]
    nested = b"[" * 900 + b"]" * 900
    texts = [json.dumps(each).encode() for each in (whole, *wrong, graph)]
    return [
        *texts,
        texts[0] + b"\n" + texts[0],
        json.dumps({"version": 2, "program": "p", "calls": timed}).encode(),
        dump(chat(random.Random(0), "chat")).encode(),
        b'{"program": "p", "arrival_s": 1e999, "calls": []}',
        b'{"program": ' + nested + b', "calls": []}',
        b'{"program": "p", "calls": [{"id": "a", "parents": ' + nested + b"}]}",
        b"[" * 100_000,
        b"\xff\xfe",
        b"",
    ]
