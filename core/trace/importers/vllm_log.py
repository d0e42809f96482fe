"""The log of `vllm serve` at level DEBUG, which has the token ids of prompts and answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

from weft.core.errors import TraceError
from weft.core.trace.block_hashes import with_block_hashes
from weft.core.trace.format import TraceCall, TraceProgram
from weft.core.trace.importers.contract import Blocks, BlockScope, LeftOut
from weft.core.trace.importers.reading import lines, tokens_of
from weft.core.trace.prefixes import BLOCK_TOKENS

_COMMAND: Final = "vllm serve --enable-log-requests --enable-log-outputs --log-level DEBUG"
_LINE: Final = re.compile(r"\(\w+ pid=\d+\) [A-Z]+ (\d\d-\d\d \d\d:\d\d:\d\d) \[\S*?(\w+)\.py:\d+\] (.*)")
_IDS: Final = r"(\[[\d, ]*\]|\([\d, ]*\)|None)"
_PROMPT: Final = re.compile(rf"Request (\S+) details: prompt: .*, prompt_token_ids: {_IDS}, prompt_embeds shape: .*")
_RECEIVED: Final = re.compile(r"Received request (\S+): params: (?:SamplingParams\(n=(\d+))?")
_TOKENS: Final = re.compile(rf"Generated response (\S+)(?: \(streaming \w+\))? details: output_token_ids: {_IDS}")
_ANSWER: Final = re.compile(
    r"Generated response (\S+)( \(streaming delta\))?(?: \(streaming complete\))?: output: (.*)"
)
_YEAR_S: Final = 366 * 86400.0


@dataclass(slots=True)
class _Request:
    """A request that is not answered yet."""

    arrival_s: float
    prompt_tokens: int
    prompt: list[int]  # hashes of its blocks
    output_tokens: int = 0
    answers: int = 1  # that are still to come


class VllmLog:
    """Reads requests, of which nothing says which belong together: each is a program. Blocks are those of the tokens.

    The times of a log have whole seconds and no year.
    """

    name: str = "vllm"
    description: str = f"the log of {_COMMAND}"

    def matches(self, path: Path, head: str) -> bool:
        """Whether a line has the form of vLLM's log."""
        del path
        return _LINE.search(head) is not None

    def read(self, path: Path, blocks: Blocks, advance: Callable[[int], object]) -> Iterator[TraceProgram | LeftOut]:
        """Yield a program for each request that was answered. The first one arrives at 0."""
        scope, clock = blocks.scope(), _Clock()
        open_requests: dict[str, _Request | None] = {}  # None: its prompt is not in the log
        left_out = 0
        for number, line in lines(path, advance):
            where, found = f"{path}, line {number}", _LINE.match(line)
            if found is None or found[2] != "request_logger":
                continue
            message = found[3]
            if prompt := _PROMPT.match(message):
                left_out += prompt[1] in open_requests
                at_s, tokens = clock.since_start_s(found[1], where), _ids(prompt[2], where)
                open_requests[prompt[1]] = _Request(at_s, len(tokens), _hashes(tokens)) if tokens is not None else None
            elif received := _RECEIVED.match(message):
                if received[1] not in open_requests:
                    raise TraceError(f"{where}: the prompt's tokens are not in the log; expected that of {_COMMAND}.")
                if (request := open_requests[received[1]]) is not None:
                    request.answers = max(1, int(received[2] or 1))
            elif answered := _TOKENS.match(message):
                if (request := open_requests.get(_asked(answered[1], open_requests))) is not None:
                    request.output_tokens += len(_ids(answered[2], where) or [])
            elif (answered := _ANSWER.match(message)) and answered[2] is None:
                name = _asked(answered[1], open_requests)
                if (request := open_requests.get(name)) is not None:
                    request.answers -= 1
                    if not request.answers:
                        del open_requests[name]
                        yield _program(f"{path.stem}-{answered[1]}", request, answered[3], scope)
        left_out += len(open_requests)
        if left_out:
            yield LeftOut(left_out)


class _Clock:
    """Seconds since the first time of a log."""

    def __init__(self) -> None:
        self._start_s: float | None = None
        self._last_s = 0.0

    def since_start_s(self, text: str, where: str) -> float:
        """Return the seconds up to a time such as `11-25 16:50:01`. A time long before the last one is a year later."""
        try:
            at_s = (datetime.strptime(f"2000-{text}", "%Y-%m-%d %H:%M:%S") - datetime(2000, 1, 1)).total_seconds()
        except ValueError:
            raise TraceError(f"{where}: the time is {text!r:.40}; expected one such as 11-25 16:50:01.") from None
        if at_s < self._last_s - _YEAR_S / 2:
            at_s += _YEAR_S
        self._last_s = at_s
        if self._start_s is None:
            self._start_s = at_s
        return max(0.0, at_s - self._start_s)


def _program(name: str, request: _Request, answer: str, scope: BlockScope) -> TraceProgram:
    # A stream's tokens are logged with its parts, or not at all.
    output = request.output_tokens or tokens_of(answer.rpartition(", finish_reason: ")[0])
    call = TraceCall("c0", (), max(1, output), request.prompt_tokens, at_s=0.0)
    program = TraceProgram(name, (call,), request.arrival_s)
    return with_block_hashes(program, {"c0": scope.numbers(request.prompt)}, BLOCK_TOKENS)


def _asked(answered: str, open_requests: Container[str]) -> str:
    """The id under which a request was logged. The answers of Responses have another one, `resp_1` for `resp_1_0`."""
    return answered if answered in open_requests else f"{answered}_0"


def _ids(text: str, where: str) -> list[int] | None:
    if text == "None":
        return None
    try:
        found: list[int] = json.loads(f"[{text[1:-1].removesuffix(',')}]")
    except ValueError:
        raise TraceError(f"{where}: the token ids are {text!r:.40}; expected whole numbers in brackets.") from None
    return found


def _hashes(tokens: list[int]) -> list[int]:
    whole = len(tokens) - len(tokens) % BLOCK_TOKENS
    return [hash(tuple(tokens[begin : begin + BLOCK_TOKENS])) for begin in range(0, whole, BLOCK_TOKENS)]
