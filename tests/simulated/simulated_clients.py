"""The clients of a simulated engine, and what they check of their answers."""

from __future__ import annotations

import asyncio
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import cache, partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from history import Lost
from scheduler_harness import expected_output
from simulated_loop import TICK_S
from simulated_replica import MAX_MODEL_LEN

import weft
from weft.core.errors import (
    ContextLengthError,
    DeadlineError,
    EngineClosedError,
    InvalidRequestError,
    OverloadedError,
    ProgramEndedError,
    ReplicaLostError,
    ServerError,
    UnknownModelError,
    WeftError,
)
from weft.core.ids import IdSource
from weft.engine.models.scripted_model import make_scripted_model

if TYPE_CHECKING:
    from simulated_life import Life

MODEL: Final = "simulated"
LONGEST: Final = 150  # tokens, of a short call and its answer
HALF: Final = "\N{REPLACEMENT CHARACTER}"
# What no engine takes, and the error that says so.
_REFUSED: Final[tuple[tuple[dict[str, Any], type[WeftError]], ...]] = (
    ({"temperature": -1}, InvalidRequestError),
    ({"timeout_s": -1}, InvalidRequestError),
    ({"model": "another"}, UnknownModelError),
    ({"messages": [{"role": "user", "content": "x" * 2 * MAX_MODEL_LEN}]}, ContextLengthError),
)


class Client:
    """A program on the clients' event loop. It makes calls one after the other or at once, whole or streamed."""

    def __init__(self, life: Life, number: int) -> None:
        self.rng = random.Random(f"client {life.seed} {number}")
        self.life, self.name = life, f"p{number}"
        rng = self.rng
        self.program = weft.Program(
            self.name,
            session_id=f"session-{number % 2}" if rng.random() < 0.3 else None,
            timeout_s=rng.randrange(1, 4000) * TICK_S if rng.random() < 0.1 else None,
            ids=IdSource(random.Random(f"ids {life.seed} {number}")),
        )
        self.calls: dict[str, asyncio.Task[None]] = {}
        self._is_conversation = rng.random() < 0.6
        self._messages: list[dict[str, str]] = []
        self._context_tokens = 0
        self._odd = random.Random(f"odd {life.seed} {number}")

    async def run(self) -> None:
        """Make the program's calls."""
        rng, program, history = self.rng, self.program, self.life.history
        await asyncio.sleep(rng.randrange(2000) * TICK_S)
        with program:
            history.add("open", program.program_id)
            try:
                for turn in range(rng.randrange(1, 6 if self._is_conversation else 4)):
                    names = [f"{self.name}.{turn}.{each}" for each in range(rng.choice([1, 1, 3]))]
                    tasks = {name: asyncio.ensure_future(self._call(name)) for name in names}
                    if self._odd.random() < 0.1:
                        name = f"{self.name}.{turn}.refused"
                        tasks[name] = asyncio.ensure_future(self._refused(name))
                    self.calls.update(tasks)
                    if rng.random() < 0.1:  # it changes its mind at once
                        for _ in range(rng.randrange(6)):
                            await asyncio.sleep(0)
                        rng.choice(list(tasks.values())).cancel()
                    await asyncio.wait(tasks.values())
                    if rng.random() < 0.3:
                        await asyncio.sleep(rng.randrange(500) * TICK_S)
            except asyncio.CancelledError:
                for task in self.calls.values():
                    task.cancel()
                if rng.random() < 0.5:  # otherwise the end of the program aborts them
                    await asyncio.wait(self.calls.values())
                raise
            finally:
                history.add("close", program.program_id)

    async def _call(self, name: str) -> None:
        program, rng, note = self.program, self.rng, self.life.history.add
        engine = self.life.remote or self.life.engine
        identity = program.reports.start_call(name)
        self.life.call_names[identity.call_id] = name
        has_room = self._is_conversation and self._context_tokens + LONGEST < MAX_MODEL_LEN
        body, text = random_call(rng, name, is_short=has_room and bool(self._messages))
        if has_room:
            body["messages"] = [*self._messages, *body["messages"]]
        tokens = body["max_tokens"]
        note("invoke", program.program_id, identity.call_id, tokens)
        self.life.world.note(f"{name} asks for {tokens} tokens")
        stopped_s = self.life.world.stopped_s
        answer = Answer(partial(note, "token", program.program_id, identity.call_id), text)
        is_whole = False
        outcome: Any = "finished" if "stop" not in body else "broken off"
        try:
            if rng.random() < 0.5:
                answer.take(await engine.chat(body, program, identity))
                is_whole = True
            else:
                async with aclosing(engine.chat_stream(body, program, identity)) as chunks:
                    async for chunk in chunks:
                        answer.take(chunk)
                        if rng.random() < 0.01:
                            outcome = "broken off"
                            is_early = answer.count + 20 < tokens and stopped_s == self.life.world.stopped_s
                            if "stop" not in body and is_early:
                                self.life.left_early.append(name)
                            break
                    else:
                        is_whole = True
            program.reports.end_call(name, identity)
            if is_whole:
                self._messages = [*body["messages"], {"role": "assistant", "content": answer.texts[0]}]
                self._context_tokens = len(answer.prompt) + 4 * len(answer.choices[0])  # half characters grow
        except ReplicaLostError as error:
            others = answer.count - len(answer.choices.get(0, ()))  # the history has the tokens of one choice
            outcome = Lost(error.delivered_tokens - others)
        except (WeftError, asyncio.CancelledError) as error:
            is_end = isinstance(error, EngineClosedError | ServerError) and self.life.wants_shutdown
            outcome = "ProgramEndedError" if is_end else type(error).__name__
            if isinstance(error, ServerError) and error.status == HTTPStatus.SERVICE_UNAVAILABLE and not is_end:
                outcome = "NoReplicaError"  # what the client of a server sees of it
        except BaseException as error:
            self.life.world.complain(f"{name} ended in an unexpected way", error)
            outcome = type(error).__name__
        note("return", program.program_id, identity.call_id, outcome)
        self.life.world.note(f"{name} {outcome}, {answer.count} tokens")
        self.life.problems += [f"{name} {problem}" for problem in answer.problems(body, is_whole=is_whole)]

    async def _refused(self, name: str) -> None:
        """Make a call that no engine takes."""
        program, engine = self.program, self.life.remote or self.life.engine
        fields, expected = self._odd.choice(_REFUSED)
        body = random_call(self._odd, name)[0] | fields
        identity = program.reports.start_call(name)
        try:
            if self._odd.random() < 0.5:
                await engine.chat(body, program, identity)
            else:
                async with aclosing(engine.chat_stream(body, program, identity)) as chunks:
                    await anext(chunks)
            self.life.problems.append(f"{name} was not refused")
        except (expected, OverloadedError, ProgramEndedError, DeadlineError, asyncio.CancelledError) as error:
            self.life.world.note(f"{name} {type(error).__name__}")
        except BaseException as error:
            is_end = isinstance(error, EngineClosedError | ServerError) and self.life.wants_shutdown
            if not is_end:
                self.life.world.complain(f"{name} ended in an unexpected way", error)


def random_call(rng: random.Random, name: str, *, is_short: bool = False) -> tuple[dict[str, Any], str]:
    """A request, and the text that tells it from others. `timeout_s` is among its fields."""
    tokens, padding = rng.choice([(1, 200), (3, 40), (10, 0), (30, 200), (150, 0)])
    if is_short:
        tokens, padding = min(tokens, 30), 0
    text = f"{name} {'x' * padding}"
    body: dict[str, Any] = {
        "messages": [{"role": "user", "content": text}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
        "return_token_ids": True,
    }
    if rng.random() < 0.15:
        body["timeout_s"] = rng.randrange(1, 3000) * TICK_S
    if rng.random() < 0.1:
        body |= {"n": 2, "temperature": 1}
    elif rng.random() < 0.1:
        body["stop"] = ["e"]
    return body, text


class Answer:
    """What a client got."""

    def __init__(self, note: Callable[[int], object], text: str) -> None:
        self._note, self._text = note, text
        self.prompt: list[int] = []
        self.choices: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.ends: dict[int, int] = {}
        self.report: dict[str, Any] = {}  # the call's ids and account

    @property
    def count(self) -> int:
        return sum(map(len, self.choices.values()))

    def take(self, data: dict[str, Any]) -> None:
        """Take a whole answer or a chunk."""
        self.prompt = data.get("prompt_token_ids") or self.prompt
        self.report = data.get("weft") or self.report
        for choice in data["choices"]:
            ids = self.choices.setdefault(choice["index"], [])
            for token in choice.get("token_ids") or ():
                if choice["index"] == 0:
                    self._note(len(ids))
                ids.append(token)
            part = choice.get("message") or choice["delta"]
            self.texts[choice["index"]] = self.texts.get(choice["index"], "") + (part.get("content") or "")
            if choice.get("finish_reason"):
                self.ends[choice["index"]] = self.ends.get(choice["index"], 0) + 1

    def problems(self, body: dict[str, Any], *, is_whole: bool) -> Iterator[str]:
        """What is wrong with it. It must be a beginning of what the model says to this client's text, and a whole
        answer must be all of it."""
        if self.prompt and self._text not in decoded(tuple(self.prompt)):
            yield "got the answer to another prompt"
        said = expected_output(self.prompt, body["max_tokens"]) if self.prompt else []
        for index, ids in self.choices.items():
            if ids != said[: len(ids)]:
                yield f"got other tokens in choice {index}: {ids}, not {said}"
        if not is_whole:
            return
        if sorted(self.choices) != list(range(body.get("n", 1))):
            yield f"finished with the choices {sorted(self.choices)}"
        if not self.report:
            yield "finished without an account"
        for index, ids in self.choices.items():
            if self.ends.get(index) != 1:
                yield f"had {self.ends.get(index, 0)} reasons to end in choice {index}"
            if "stop" in body:
                continue
            wanted = min(body["max_tokens"], MAX_MODEL_LEN - len(self.prompt))
            if len(ids) != wanted:
                yield f"finished with {len(ids)} of {wanted} tokens in choice {index}"
            text = decoded(tuple(ids)).rstrip(HALF)  # vLLM keeps half a character back
            if text != self.texts[index].rstrip(HALF):
                yield f"got the text {self.texts[index]!r} for {text!r}"


@cache
def model_folder() -> str:
    """A model without weights, whose prompts are the requests themselves."""
    return str(make_scripted_model(Path(tempfile.mkdtemp(prefix="weft-simulated-model-"))))


@cache
def _tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_folder())


@cache
def decoded(tokens: tuple[int, ...]) -> str:
    """The text of tokens."""
    return str(_tokenizer().decode(list(tokens), skip_special_tokens=True))
