"""Finds the program of a request that carries no id, by the messages that it continues.

`docs/explanation/lineage.md` has the rules, in their order. A conversation after an answer is a *state*. An answer with
the message before it is an *exchange*. All digests begin with the scope of the request's API key, so no key finds
another one's programs.

`conversations.py` makes the digests, `states.py` follows states, and `recent.py` is the memory that forgets.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import chain, islice, pairwise, takewhile
from typing import Any, Final, NamedTuple

import numpy as np

from weft.core.identity.conversations import (
    CALL_ID,
    SYSTEM,
    Said,
    arguments_of,
    ids_in,
    is_answer,
    is_input,
    steps_in,
    without_system,
)
from weft.core.identity.families import label_of, task_in
from weft.core.identity.given import (
    KEPT_BYTES,
    LONG_BYTES,
    NEW_BYTES,
    PROMPT_BYTES,
    SEARCHED,
    SHORT_BYTES,
    Before,
    GivenAnswer,
    Prompt,
    Question,
    Sample,
    folded_texts,
    parts_of,
    sample_of,
    searched_texts,
    texts_of,
)
from weft.core.identity.handed import Handed, HandedText, Turns
from weft.core.identity.items import SILENCE, Digest, Item, digest_of, in_order, utf8_bytes
from weft.core.identity.items import chain as chain_of
from weft.core.identity.pieces import PIECE, Groups, Index, Told, Values, folded, keys_of, pieces_of, placed_pieces_of
from weft.core.identity.readings import Readings
from weft.core.identity.recent import Recent
from weft.core.identity.sources import Described, Evidence, Identity, Source
from weft.core.identity.states import SEVERAL, State, continued, go_on, longest, owner_by_connection, reached
from weft.core.ids import IdSource, ProgramId, ThreadId

MOST_STATES: Final = 30_000  # and traces, and responses; those unused for longest are forgotten
Answers = Iterable[Iterable[Item]]  # the items of each
_DESCRIBED: Final = tuple(each.name for each in dataclasses.fields(Described))
_MOST_GIVEN: Final = 16  # answers to a prompt
_GIVEN_BYTES: Final = 512  # folded, of the beginning of an answer
_CUT_MARKS: Final = ".,:;!?-\u2013\u2014\u2026".encode()  # behind an answer that a client has cut
_MOST_EXCHANGES: Final = 32  # of a conversation, that are looked at, and items before each of them
_MOST_CACHED: Final = 256 << 10  # characters of a system prompt, or of an answer
_MOST_AGENTS: Final = 16  # of a program; more are one whose system prompt changes
_MOST_STARTED: Final = 256  # agents of a program that tool calls have started
_LONG_CHARACTERS: Final = 80
_LINE_BYTES: Final = 40  # folded, of the end of the last line of a prompt
_MOST_RETURNED: Final = 64  # of the latest items, among which are results that were not told before
_NEW_KEYS: Final = 4  # of a prompt that nobody else was told


class Placed(NamedTuple):
    """Where a request belongs."""

    identity: Identity  # with the program of the request
    peer: str = ""  # the connection that it came by
    said: Said = Said([], b"", [], [], b"", {})  # its messages; none if lineage did not look for its program
    question: Question | None = None  # the last message before the answer
    start: Digest = b""  # what the digests of the messages begin with
    prompt: Prompt | None = None  # what it told the model that no request had told before
    body_bytes: int = 0  # of its body


class _Given(NamedTuple):
    """A tool call that a program was given."""

    program_id: ProgramId
    handed: list[Digest]  # the short texts in it, which may become another agent's task until it returns


class _Agent(NamedTuple):
    """An agent of a program."""

    system: Sample  # of its system prompt
    kind: str = ""  # what the tool call says that has started it
    is_started: bool = False  # by a tool call, and so it has a thread of its own
    asked_by: int | None = None  # the agent that waits for it


class _System(NamedTuple):
    """A system prompt."""

    text: bytes  # folded
    of_agent: Sample  # the same without digits, such as those of a clock
    values: Values  # its pieces
    sample: Sample
    is_whole: bool  # it was short enough for all of it


class _Asked(NamedTuple):
    """A request whose program is looked for."""

    said: Said
    start: Digest
    scope: str
    peer: str
    system: _System
    reached: tuple[int, State | None]  # see `longest`

    def key_of(self, item: Item) -> Digest:
        """What an answer in it is kept by. Python keeps its lock while it hashes a text, so long ones are not."""
        kept = self.said.kept if len(item) <= 5 and len(item[-1]) <= _MOST_CACHED else {}
        return kept.get(item) or kept.setdefault(item, _answer_key(self.start, item))


class _Found(NamedTuple):
    source: Source = Source.NEW
    program_id: ProgramId | None = None
    known: int = 0  # items that the program has had before
    is_mixed: bool = False  # its answers are of several programs
    is_doubtful: bool = False  # it may continue each of several programs


class _Told(NamedTuple):
    """The new part of a request: what its program was not told before."""

    items: list[Item]
    text: bytes
    values: Values
    keys: list[int]
    prompts: list[Prompt]  # of any program, with a piece of it
    is_whole: bool  # it was short enough for all of it


class Lineage:
    """Finds programs by messages. Not for several threads.

    Args:
        most_states: How many states, answers, prompts, calls, traces, connections and responses are kept, each.
        is_open: Whether a program has not ended. Texts that the models of ended programs wrote are no evidence.
    """

    def __init__(self, most_states: int = MOST_STATES, is_open: Callable[[ProgramId], bool] = lambda _: True) -> None:
        self._is_open = is_open
        self._readings = Readings()
        self._states: Recent[State] = Recent(most_states, State.size)
        self._given: Recent[dict[bytes, ProgramId]] = Recent(most_states)  # how the answers to a prompt begin
        self._calls: Recent[_Given] = Recent(most_states)  # of tools, by their ids
        self._written: Index[GivenAnswer] = Index()
        self._answers = Recent(most_states, GivenAnswer.size, lambda each: self._written.drop(each.places))
        self._prompts: Recent[Prompt] = Recent(most_states, Prompt.size, self._forget_prompt)
        self._asked: Groups[Prompt] = Groups()
        self._handed = Handed(most_states, is_open)
        self._agents: Recent[list[_Agent]] = Recent(most_states, len)  # of a program
        self._told = Told()
        self._unknown: Recent[ProgramId] = Recent(most_states)  # told more than was read: their texts are no evidence
        self._named: Recent[ProgramId] = Recent(most_states)  # by traces and responses
        self._peers: Recent[ProgramId] = Recent(most_states)  # the latest program of a connection
        self._left: Recent[ProgramId] = Recent(most_states)  # requests whose clients have not the whole answer
        # The requests that began programs and failed, and whether the next one like it has not come yet.
        self._failed: Recent[tuple[ProgramId, bool]] = Recent(most_states)
        self._openings: Recent[ProgramId] = Recent(most_states)  # what was told before any answer
        self._turns = Turns(is_open)
        self._ids = IdSource()

    def __len__(self) -> int:
        return sum(len(each) for each in vars(self).values() if isinstance(each, Recent))

    def place(self, evidence: Evidence, body: Mapping[str, Any], scope: str, peer: str = "") -> Placed:
        """Find the program of a request of any of the three APIs, or begin one. `peer`, the name of its connection,
        decides only between programs with the same messages."""
        start = digest_of(b"", scope, evidence.prompt_cache_key or "")
        said = self._readings.read(body, scope, start, evidence.body_bytes)
        prompts = said.of_kind(SYSTEM)
        texts = tuple(tuple(texts_of(said.items[at])) for at in prompts)
        leading = sum(map(int.__eq__, prompts, range(len(prompts))))  # some clients add more of them later
        system = (_system_again if sum(map(len, chain(*texts))) <= _MOST_CACHED else _system_of)(texts, leading)
        asked = _Asked(said, start, scope, peer, system, longest(self._states, scope, said))
        found = self._known(evidence, asked)
        told = self._new(asked, said.items[found.known :])
        task = None
        if found.program_id is None and not found.is_doubtful:
            others = [item for item in said.items if not is_answer(item)]
            searched = self._new(asked, others) if found.is_mixed else told
            task = self._handed.find(scope, start, searched.items, searched.text)
            found = _Found(
                Source.LINEAGE, task.program_id if task else self._by_text(asked, searched, is_mixed=found.is_mixed)
            )
        source, program_id = found.source, found.program_id
        if program_id is None:
            source, program_id = Source.LINEAGE, self._failed_before(asked)
        if program_id is None:
            source, program_id = Source.NEW, ProgramId(f"{scope}/{self._ids.program()}")
        self._go_on(asked, program_id)
        prompt = self._tell(asked, told, program_id)
        self._turns.asked(scope, program_id, told.text, asked.system.sample)
        for name, value in ((b"correlation", evidence.correlation_id), (b"trace", evidence.trace_id)):
            if value is not None:
                self._named.put(scope, digest_of(name, scope, value), program_id)
        if peer:
            self._peers.put(scope, digest_of(b"peer", scope, peer), program_id)
        at, state = asked.reached
        is_own = state is not None and program_id in state.owners and said.answer_after(at) is None
        number, agent = self._agent(asked, program_id, task, state.agent if state is not None and is_own else None)
        # Without messages and other evidence no later request can be known to continue it.
        is_alone = not said.items and source is Source.NEW and evidence.trace_id is evidence.correlation_id is None
        label = evidence.label or label_of(evidence.program_name, agent.kind)
        fields = {name: getattr(evidence, name) for name in _DESCRIBED}
        fields |= {"label": label, "ends": evidence.ends or is_alone}
        openings = (text for item in said.items if is_input(item) for text in texts_of(item))
        opening = digest_of(b"", first[:_GIVEN_BYTES]) if (first := next(openings, "")) else b""
        thread_id = ThreadId(f"agent-{number}") if agent.is_started and number else None
        parent = task.thread_id if task else None
        identity = Identity(source, program_id, thread_id, parent, agent=number, opening=opening, **fields)
        return Placed(identity, peer, said, self._question(asked, program_id), start, prompt, evidence.body_bytes)

    def answered(
        self, placed: Placed, answers: Answers, scope: str, response_id: str | None, is_part: bool = False
    ) -> None:
        """Note the answers to a request, before its client gets them. A part is a tool call of an answer that goes on:
        some clients make it before they have the rest. A later request may name the answer by the response's id."""
        program_id = placed.identity.program_id
        if response_id is not None:
            self._named.put(scope, digest_of(b"response", scope, response_id), program_id)
        if not placed.said.items:
            return
        prompt = placed.said.digests[-1]
        for items in map(list, answers):
            if not items:
                continue  # the prompt is no state, or each request would continue itself
            for item in items:
                self._note_answer(scope, placed, item)
            if is_part:
                continue
            reached(self._states, scope, prompt, items, (program_id, placed.identity.agent), peer=placed.peer)
            self._note_given(scope, prompt, items, program_id)
            self._turns.answered(scope, program_id, items, placed.said.items)
            if placed.prompt is not None and len(placed.prompt.answers) < _MOST_GIVEN:
                size = placed.prompt.size()
                placed.prompt.answers.append(parts_of(items))
                if not placed.prompt.is_forgotten:
                    self._prompts.grow(scope, placed.prompt.size() - size)

    def left(self, placed: Placed, scope: str, *, has_failed: bool = False) -> None:
        """Note that a request has ended, and that its client has not the whole answer. It may send the request again,
        or go on from it.

        If a request that began a program got an error (`has_failed`), the next one with the same messages belongs
        there, unless something else names its program. Whoever sends it, nobody has heard anything in that program.
        """
        said, question, program_id = placed.said, placed.question, placed.identity.program_id
        if not said.items:
            return
        whole = said.digests[-1]
        is_first = placed.identity.source is Source.NEW or self._failed.get(scope, whole) == (program_id, False)
        if has_failed and is_first:
            self._failed.put(scope, whole, (program_id, True))
        opening = _openings_in(placed.start, said, question.system)[-1:] if question is not None else []
        _note_owner(self._left, scope, [whole, *opening], program_id)

    def _failed_before(self, asked: _Asked) -> ProgramId | None:
        """The program that began with the same request, if that failed and this is the next one like it."""
        key = asked.said.digests[-1:]
        failed = self._failed.get(asked.scope, key[0]) if key else None
        if failed is None or not failed[1]:
            return None
        self._failed.put(asked.scope, key[0], (failed[0], False))
        return failed[0]

    def _known(self, evidence: Evidence, asked: _Asked) -> _Found:  # noqa: PLR0911  one for each rule
        """The program that a request names, or whose conversation it continues."""
        scope, said = asked.scope, asked.said
        left = self._left.get(scope, said.digests[-1]) if evidence.is_retry and said.items else None
        if left is not None and left != SEVERAL:
            self._left.pop(scope, said.digests[-1])
            return _Found(Source.LINEAGE, left)
        for source, kind, named in (
            (Source.PREVIOUS_RESPONSE, b"response", evidence.previous_response_id),
            (Source.CORRELATION, b"correlation", evidence.correlation_id),
        ):
            if named is not None and (found := self._named.get(scope, digest_of(kind, scope, named))) is not None:
                return _Found(source, found)
        state_place, state = asked.reached
        if state is not None:
            latest = self._peers.get(scope, digest_of(b"peer", scope, asked.peer))
            found = continued(state, said, state_place, owner_by_connection(state, asked.peer, latest))
            if found is not None:
                return _Found(Source.LINEAGE, found, state_place + 1)
        is_one_of_twins = state is not None and said.answer_after(state_place) is None
        for place, call_id in ids_in(said):
            given = self._calls.get(scope, digest_of(asked.start, "call id", call_id))
            if given is not None and given.program_id != SEVERAL:
                return _Found(Source.LINEAGE, given.program_id, place + 1)
        source, found = Source.LINEAGE, self._answerer(asked) if state is None else None
        if found is None and evidence.trace_id is not None:
            source, found = Source.TRACE, self._named.get(scope, digest_of(b"trace", scope, evidence.trace_id))
        if found is not None:
            return _Found(source, found)
        if is_one_of_twins:
            return _Found(is_doubtful=True)
        by_exchanges = self._by_exchanges(asked)
        found = self._opener(asked) if by_exchanges == _Found() else None
        return _Found(Source.LINEAGE, found) if found is not None else by_exchanges

    def _opener(self, asked: _Asked) -> ProgramId | None:
        """The only program that was told how a conversation begins, if its client left before it had the whole answer,
        and now has told more, or has an empty answer, or one that it had put in place of another answer before."""
        said = asked.said
        told = _openings_in(asked.start, said, asked.system.sample)
        places = said.answers[-_MOST_EXCHANGES:]
        answers = [said.items[at] for at in places]
        wholes = [said.digests[at - 1] for number, at in enumerate(places) if answers[number] in answers[:number]]
        begun = told if next(filter(is_answer, said.items), None) == SILENCE else told[:-1]
        for key in [*reversed(wholes), *begun] if told else ():
            owner = self._left.get(asked.scope, key)
            if owner not in (None, SEVERAL) and owner == self._openings.get(asked.scope, key):
                self._left.pop(asked.scope, key)  # another one may only begin alike
                return owner
        return None

    def _answerer(self, asked: _Asked) -> ProgramId | None:
        """The program that was given the latest answer of a conversation, which its client has cut or added to."""
        said = asked.said
        place = next(said.latest_first(), (0, 0))[0]
        given = self._given.get(asked.scope, said.digests[place - 1]) if place else None
        if not place or given is None or said.items[place][0] != "message":
            return None
        text = folded_texts(said.items[place : place + 1])[:_GIVEN_BYTES].rstrip(_CUT_MARKS)
        found = {
            program_id
            for known, program_id in given.items()
            if min(len(text), len(known)) >= SHORT_BYTES and (text in known or text.startswith(known))
        }
        return next(iter(found)) if len(found) == 1 and SEVERAL not in found else None

    def _by_exchanges(self, asked: _Asked) -> _Found:
        """The program that had the latest exchanges of a conversation, if no other program had them."""
        said = asked.said
        alive: dict[ProgramId, Question | None] | None = None  # None: it began with the answers before
        bytes_of: Counter[ProgramId] = Counter()
        counts: Counter[ProgramId] = Counter()
        first, known, is_latest, latest = 0, 0, True, {}
        for begin, end in islice(said.latest_first(), _MOST_EXCHANGES):
            last = said.answers[at - 1] if (at := bisect_left(said.answers, begin)) else -1
            questions = without_system(said.items[max(last + 1, begin - _MOST_EXCHANGES) : begin][::-1])
            owners = self._owners(asked, said.items[begin:end], questions)
            if not owners:  # nobody gave this answer, which says nothing
                is_latest = is_latest and alive is not None
                continue
            if alive is None:
                alive, first, known, latest = {**owners}, begin, end, owners
            else:
                before = asked.key_of(said.items[end - 1])
                alive = {
                    each: owners.get(each)
                    for each, had in alive.items()
                    if each in owners or had is None or had.before == before
                }
                if not alive:  # these are examples, of what several programs were asked
                    return _Found(is_mixed=True)
            for each in alive.keys() & owners.keys():
                counts[each] += 1
            if not is_latest:
                bytes_of.update(dict.fromkeys(alive, len(folded_texts([*questions[:1], *said.items[begin:end]]))))
        if is_latest and alive is not None and len(alive) > 1:  # of twins, one that has not gone on from there waits
            place = sum(at < first for at in said.answers)
            waiting = (each for each in alive if latest[each].next is None and latest[each].place == place)
            alive = {each: alive[each] for each in waiting} or alive
        if alive is None or len(alive) > 1:
            return _Found()
        had = latest[program_id := next(iter(alive))]
        if counts[program_id] < 2:
            lead = self._before(asked, program_id, first)[1]
            is_new = lead is not None and had.lead is not None and lead != had.lead
            behind = _behind(said, known)
            is_same = had.next is None or any(map(had.next.is_related_to, (behind, behind.partition(b"\0")[0])))
            is_same = is_same or had.is_passed_on
            answers = (asked.key_of(said.items[at]) for at in said.answers if at >= known)
            later = (self._answers.get(asked.scope, key) for key in answers)
            if is_new or not (is_same or any(each is not None and program_id in each.owners for each in later)):
                return _Found(is_mixed=True)  # an example: other ones stood before it, or the program has gone on
        is_enough = is_latest or bytes_of[program_id] >= _LONG_CHARACTERS
        agents = self._agents.get(asked.scope, digest_of(b"agents", program_id)) or [] if had.next is None else []
        is_agent = asked.system.text != b"" and any(each.system.is_nearly(asked.system.of_agent) for each in agents)
        if not is_enough or (counts[program_id] < 2 and not is_agent and not had.system.is_like(asked.system.sample)):
            return _Found()
        return _Found(Source.LINEAGE, program_id, known)

    def _before(self, asked: _Asked, owner: ProgramId, end: int) -> tuple[Digest | None, frozenset[Digest] | None]:
        """The latest answer before a place that a model gave, and all that are others' examples; None: the owner had
        one. Those that several programs were given, and that nobody had as an example, may be the owner's after all."""
        before, lead = None, set()
        for item in (asked.said.items[at] for at in reversed(asked.said.answers[-_MOST_EXCHANGES:]) if at < end):
            key = asked.key_of(item)
            known = self._answers.get(asked.scope, key)
            before = before or (key if known is not None else None)
            if known is not None and owner in known.owners:
                return before, None
            given = known.owners.values() if known is not None else ()
            is_example = len(given) < 2 or any(each is not None and each.is_example for each in given)
            if is_example and sum(map(len, texts_of(item))) >= SHORT_BYTES:
                lead.add(key)
        return before, frozenset(lead)

    def _owners(self, asked: _Asked, answer: list[Item], questions: list[Item]) -> dict[ProgramId, Question]:
        """The programs that were given an answer to questions. Parts that nobody was given are left out."""
        told = list(map(Before, questions))
        owners: dict[ProgramId, Question] | None = None
        for item in answer:
            if (found := self._given_to(asked, item, told)) is not None:
                owners = found if owners is None else {each: had for each, had in owners.items() if each in found}
        return owners or {}

    def _given_to(self, asked: _Asked, item: Item, told: list[Before]) -> dict[ProgramId, Question] | None:
        """The programs that were given a part of an answer to one of some questions; None: nobody is known."""
        key = asked.key_of(item)
        known = self._answers.get(asked.scope, key)
        if known is None and item[0] == "call":
            known = self._answers.get(asked.scope, _answer_key(asked.start, item, with_id=False))
        if known is None or not known.is_crowded:
            return known.asked(told) if known is not None else None
        keys = (digest_of(key + sample_of(each.text).head, "exchange") for each in told)
        kept = (each for key in keys if (each := self._answers.get(asked.scope, key)) and not each.is_crowded)
        found = {each: had for one in kept for each, had in one.asked(told).items()}
        return found or None

    def _new(self, asked: _Asked, items: list[Item]) -> _Told:
        text, is_whole = searched_texts(without_system(items))
        values = pieces_of(text)
        keys = keys_of(asked.scope, values)
        return _Told(items, text, values, keys, self._asked.all(keys), is_whole)

    def _agent(
        self, asked: _Asked, owner: ProgramId, task: HandedText | None, number: int | None
    ) -> tuple[int, _Agent]:
        """An agent with its number in its program, by its system prompt unless it is known. A task that a tool call
        hands on starts an agent. If the call names no kind, it may be one in another role that nobody waits for."""
        key, system = digest_of(b"agents", owner), asked.system.of_agent
        agents = self._agents.get(asked.scope, key) or []
        count = len(agents)
        kind, caller = (task.kind, task.caller) if task is not None and number is None else ("", None)
        if number is None:
            free = [at for at, each in enumerate(agents) if each.system.is_nearly(system)]
            others = [at for at, each in enumerate(agents) if not each.is_started]
            if caller is not None:
                is_new = kind != "" or caller in free
                free = [at for at in free if agents[at].is_started and agents[at].asked_by is None and not is_new]
            elif len(others) >= _MOST_AGENTS:
                free.append(others[-1])
            number = next(iter(free), min(count, _MOST_STARTED))
        known = agents[number] if number < count else _Agent(system)
        agent = _Agent(system, kind or known.kind, known.is_started or caller is not None, known.asked_by)
        if caller is not None:
            agent = agent._replace(asked_by=caller)
        else:  # it goes on, so what it asked has been answered
            agents[:] = [each._replace(asked_by=None) if each.asked_by == number else each for each in agents]
        agents[number : number + 1] = [agent]
        if not count:
            self._agents.put(asked.scope, key, agents)
        self._agents.grow(asked.scope, len(agents) - max(1, count))
        return number, agent

    def _by_text(self, asked: _Asked, told: _Told, *, is_mixed: bool) -> ProgramId | None:
        """The program whose model wrote a text of a request."""
        prompts = [each for each in told.prompts if each.start == asked.start]
        found_by = {each.program_id for each in prompts if not each.is_shared and each.has_grown_to(told.text)}
        if not found_by and not asked.said.answers:  # the template may have another end now
            ends = [each for each in prompts if each.goes_on_in(told.text)]
            owners = {each.program_id for each in ends}
            found_by = owners if len(owners) == 1 and not any(each.is_shared for each in ends) else set()
        if not found_by:
            keys = {*told.keys, *keys_of(asked.scope, asked.system.values)}
            plain, questions = _without_exchanges(told)
            known = {each.program_id for each in prompts}
            written = self._written.among(keys).items()
            found_by = _owners_in(
                told.text + asked.system.text,
                plain + asked.system.text,
                questions,
                {key: answer for key, answer in written if answer.start == asked.start},
                known.pop() if len(known) == 1 else None,
            )
        found_by = {program_id for program_id in found_by if self._is_open(program_id)}
        said = {each: asked.key_of(each) for each in asked.said.items[-_MOST_RETURNED:] if is_answer(each)}
        given = {item: had.owners for item, key in said.items() if (had := self._answers.get(asked.scope, key))}
        if found_by or not told.is_whole or (given and is_mixed):
            return next(iter(found_by)) if len(found_by) == 1 else None
        return self._turns.find(asked.scope, asked.said.items, asked.system.text, given)

    def _tell(self, asked: _Asked, told: _Told, program_id: ProgramId) -> Prompt | None:
        """Note what a program tells its model."""
        scope = asked.scope
        others = [each for each in told.prompts if each.program_id != program_id]
        for prompt in others:
            prompt.is_shared = prompt.is_shared or prompt.is_in(told.text)
            prompt.is_new = prompt.is_new and not prompt.begins(told.text)
        self._told.add(scope, self._examples(asked, told.items))
        if not (told.is_whole and asked.system.is_whole):
            self._unknown.put(scope, digest_of(b"unknown", program_id), program_id)
        self._told.add(scope, asked.system.values)
        new = np.flatnonzero(~self._told.add(scope, told.values)).tolist()
        keys = [told.keys[at] for at in (new or range(len(told.keys)))]
        # The last ones may be of a template's end, which changes.
        keys = list(dict.fromkeys([*keys[: _NEW_KEYS // 2], *keys[-_NEW_KEYS:]]))
        digest = digest_of(asked.start, "prompt", asked.said.digests[-1].hex()) if asked.said.items else b""
        known = self._prompts.get(scope, digest)
        if not keys or known is not None:
            return known if known is not None and known.program_id == program_id else None
        prompt = Prompt(asked.start, program_id, sample_of(told.text, PROMPT_BYTES), keys, bool(new))
        prompt.is_shared = any(prompt.is_in(each.text.head) for each in others)
        self._asked.put(keys, prompt)
        self._prompts.put(scope, digest, prompt)
        return prompt

    def _examples(self, asked: _Asked, items: list[Item]) -> Values:
        """Exchanges of a request with answers that nobody gave: if a model gives one later, it is no evidence."""
        said = [
            (at, asked.key_of(each)) for at, each in enumerate(items) if at and each[:2] == ("message", "assistant")
        ]
        found = [_exchange(key, items[at - 1]) for at, key in said if self._answers.get(asked.scope, key) is None]
        return np.array(found[-_MOST_EXCHANGES:], np.uint32)

    def _forget_prompt(self, prompt: Prompt) -> None:
        prompt.is_forgotten = True
        self._asked.drop(prompt.keys, prompt)

    def _go_on(self, asked: _Asked, program_id: ProgramId) -> None:
        """Note that a program goes on from its latest answer. Texts of tool calls that have returned to it are nobody's
        task any more."""
        scope, said = asked.scope, asked.said
        go_on(self._states, scope, said, asked.reached, program_id)
        if not said.answers:
            _note_owner(self._openings, scope, _openings_in(asked.start, said, asked.system.sample)[-1:], program_id)
        elif asked.reached[1] is None:  # nobody gave the answers in it
            _note_owner(self._openings, scope, said.digests[-1:], program_id)
        for _begin, end in islice(said.latest_first(), 1):
            known = self._answers.get(scope, asked.key_of(said.items[end - 1]))
            had = known.owners.get(program_id) if known is not None else None
            if known is not None and had is not None and (had.next is None or had.is_passed_on):
                is_other = had.system.is_of_another(asked.system.sample)
                known.owners[program_id] = had._replace(next=sample_of(_behind(said, end)), is_passed_on=is_other)
        for call_id in (item[1] for item in said.items[-_MOST_RETURNED:] if item[0] == "result"):
            given = self._calls.get(scope, digest_of(asked.start, "call id", call_id))
            if given is not None and given.program_id == program_id:
                self._handed.drop(scope, given.handed)

    def _question(self, asked: _Asked, program_id: ProgramId) -> Question | None:
        """What the answer to a request will be given to."""
        items = asked.said.items
        latest = next(_told_before(items, len(items)), None)
        if latest is None:
            return None
        user = next((each for each in _told_before(items, len(items)) if each[0] == "message"), latest)
        told = [Before(each) for each in dict.fromkeys((latest, user))]
        samples = [sample_of(each.text) for each in told]
        before = self._before(asked, program_id, len(items))
        place = len(asked.said.answers)
        return Question(samples[0], samples[-1], asked.system.sample, *before, told[0].call_id, place, key=told[0].key)

    def _note_given(self, scope: str, prompt: Digest, answer: list[Item], program_id: ProgramId) -> None:
        """Note how an answer to a prompt begins, for a client that cuts it or adds to it."""
        text = folded_texts(answer[:1])[:_GIVEN_BYTES] if answer[0][0] == "message" else b""
        if len(text) < SHORT_BYTES:
            return
        given = self._given.get(scope, prompt) or {}
        if not given:
            self._given.put(scope, prompt, given)
        if text in given or len(given) < _MOST_GIVEN:
            given[text] = program_id if given.get(text, program_id) == program_id else SEVERAL

    def _note_answer(self, scope: str, placed: Placed, item: Item) -> None:
        """Note a text or a tool call that a model wrote."""
        program_id, start, said = placed.identity.program_id, placed.start, placed.said
        key = _answer_key(start, item)
        if item[0] != "call":
            asked = next(_told_before(said.items, len(said.items)), item)
            is_example = self._told.has(scope, np.array([_exchange(key, asked)], np.uint32)).any()
            text = "".join(texts_of(item))
            question = placed.question and placed.question._replace(is_example=bool(is_example))
            self._note_text(scope, placed, key, text, question)
            if question is not None and len(text) < _LONG_CHARACTERS:
                self._note_text(scope, placed, digest_of(key + question.user.head, "exchange"), "", question)
            self._hand(scope, placed, steps_in(text))
            return
        for each in (key, _answer_key(start, item, with_id=False)):
            self._note_text(scope, placed, each, "", placed.question)
        kind, _text = task_in(item)
        texts = [text for text in arguments_of(item) if utf8_bytes(text) >= SHORT_BYTES]
        for text in texts:
            self._note_text(scope, placed, digest_of(start, "answer", text), text, None)
        ways = [(way, text) for way in ("text", "entry") for text in texts]
        handed = self._hand(scope, placed, [*ways, *steps_in(item[3])], kind, placed.identity.agent)
        if CALL_ID.fullmatch(item[1]):
            digest = digest_of(start, "call id", item[1])
            given = self._calls.get(scope, digest)
            owner = program_id if given is None or given.program_id == program_id else SEVERAL
            self._calls.put(scope, digest, _Given(owner, handed))

    def _hand(
        self, scope: str, placed: Placed, ways: list[tuple[str, str]], kind: str = "", caller: int | None = None
    ) -> list[Digest]:
        """Note texts that may become an agent's task, unless the model has them from its prompt: see `steps_in`."""
        prompt = list(chain.from_iterable(placed.said.items)) if ways else []
        if placed.body_bytes <= SEARCHED:  # it is searched quicker as one text, but a copy holds up other threads
            prompt = ["\0".join(prompt)]
        told = {text for text in {text for _way, text in ways} if self._is_told(scope, text, prompt)}
        asked = [*texts_of(next(_told_before(placed.said.items, len(placed.said.items)), ("other",)))][-1:]
        lines = (folded(line)[-_LINE_BYTES:] for text in asked for line in reversed(text[-_GIVEN_BYTES:].splitlines()))
        line = next((line for line in lines if len(line) >= SHORT_BYTES), b"")
        own = placed.identity
        task = HandedText(own.program_id, kind, line, own.thread_id, caller)
        return self._handed.add(scope, placed.start, task, ways, told)

    def _is_told(self, scope: str, text: str, prompt: list[str]) -> bool:
        """Whether a model has a text from its prompt, or may have it."""
        values = pieces_of(folded(text)) if len(text) >= _LONG_CHARACTERS else None
        if values is not None and len(values):
            return bool(self._told.has(scope, values).all())
        return any(text in part for part in prompt)

    def _note_text(self, scope: str, placed: Placed, key: Digest, text: str, question: Question | None) -> None:
        program_id = placed.identity.program_id
        answer = self._answers.get(scope, key)
        if answer is None:
            answer = GivenAnswer(placed.start, folded(text)[:KEPT_BYTES])
            self._answers.put(scope, key, answer)
        size = answer.size()
        unknown = self._unknown.get(scope, digest_of(b"unknown", program_id))
        was_known = program_id in answer.owners or unknown is not None
        answer.add(program_id, question)
        if not was_known and len(answer.text) >= PIECE:
            values, places = placed_pieces_of(answer.text)
            is_told, pieces = self._told.has(scope, values).tolist(), keys_of(scope, values)
            known = filter(None, map(self._written.get, pieces))
            # If most of it is the program's already, the model has mended a draft, and it stands for that from now on.
            is_draft = 2 * sum(other.is_only_of(program_id) for other in known) > len(pieces)
            for piece, place, was_told in zip(pieces, places, is_told, strict=True):
                other, is_known = self._written.get(piece), piece in self._written
                if is_draft and other is not None and other is not answer and other.is_only_of(program_id):
                    size += other.size()
                    del other.places[piece]  # which the later answer has
                    size -= other.size()
                    self._written.drop((piece,))
                elif other is not None and program_id in other.owners:
                    continue
                if (is_known or not was_told) and piece not in answer.places:
                    answer.places[piece] = place
                    self._written.put((piece,), answer)
        self._answers.grow(scope, answer.size() - size)


def _answer_key(start: Digest, item: Item, *, with_id: bool = True) -> Digest:
    """What an answer is kept by: a text, or a tool call with its id, or without it for clients that change ids."""
    if item[0] == "call":
        return digest_of(start, "answer call", *item[1 if with_id else 2 : 4])
    return digest_of(start, "answer", "".join(texts_of(in_order(item))))


def _system_of(prompts: tuple[tuple[str, ...], ...], first: int) -> _System:
    """The system prompts of a request, the first ones of which stand before everything else, and tell the agent."""
    items: list[Item] = [("message", "system", "", "text", each) for texts in prompts for each in texts]
    text, is_whole = searched_texts(items)
    own = searched_texts(items[: sum(map(len, prompts[:first]))])[0] if 0 < first < len(prompts) else text
    return _System(text, sample_of(own.translate(None, b"0123456789")), pieces_of(text), sample_of(text), is_whole)


_system_again = lru_cache(64)(_system_of)  # many requests have the same system prompt


def _owners_in(
    text: bytes, plain: bytes, questions: list[bytes], answers: Mapping[int, GivenAnswer], teller: ProgramId | None
) -> set[ProgramId]:
    """The programs whose models wrote so much of a text that nothing else explains it.

    What several programs' models wrote is that one's whose question is in the text, too. Half as much is enough for the
    program that is the only one to have told its model other parts of the text.
    """
    bytes_of: Counter[ProgramId] = Counter()
    new_of: Counter[ProgramId] = Counter()
    for answer in set(answers.values()):
        had = {each: question for each, question in answer.owners.items() if question is not None}
        if answer.is_crowded or any(each.is_example_in(text, answer.text) for each in had.values()):
            continue
        askers = [each for each, question in had.items() if question.asked.is_part_of(text)]
        is_asked = askers or (
            answer.text in text and any(each.asked.is_related_to(asked) for each in had.values() for asked in questions)
        )
        count, new = answer.bytes_in(text if is_asked else plain, answers.keys())
        if count:
            owners = list(answer.owners) if len(answer.owners) == 1 else askers
            if len(owners) == 1:
                bytes_of[owners[0]] += count
                new_of[owners[0]] += new
    return {
        each
        for each, count in bytes_of.items()
        if count >= (LONG_BYTES // 2 if each == teller else LONG_BYTES) and new_of[each] >= NEW_BYTES
    }


def _without_exchanges(told: _Told) -> tuple[bytes, list[bytes]]:
    """A text without the answers that stand behind a question, and these questions, if they are long enough to tell."""
    left, questions = [], []
    for before, item in pairwise([("", ""), *told.items]):
        question = folded_texts([before]) if is_input(before) else b""
        if is_answer(item) and len(question) >= SHORT_BYTES:
            questions.append(question)
        else:
            left.append(item)
    return searched_texts(without_system(left))[0] if questions else told.text, questions[-_MOST_EXCHANGES:]


def _openings_in(start: Digest, said: Said, system: Sample) -> list[Digest]:
    """A digest for each beginning of what is told before the first answer, text by text, with the system prompt; none
    if that is short, and others may say the same."""
    told = filter(is_input, takewhile(lambda item: not is_answer(item), said.items))
    texts = [text for item in told for text in texts_of(item)]
    if len(texts) > _MOST_EXCHANGES or system.length + sum(map(len, texts)) < _LONG_CHARACTERS:
        return []
    own = digest_of(start + system.head + system.tail, "opening", str(system.length))
    return chain_of(own, (digest_of(b"", text) for text in texts))


def _note_owner(table: Recent[ProgramId], scope: str, keys: list[Digest], owner: ProgramId) -> None:
    for key in keys:
        table.put(scope, key, owner if table.get(scope, key) in (None, owner) else SEVERAL)


def _exchange(answer: Digest, question: Item) -> int:
    """Stands for a question and its answer among what was told."""
    return int.from_bytes(digest_of(answer, *texts_of(question))[:4])


def _behind(said: Said, place: int) -> bytes:
    """What is said from a place on, up to the next answer, folded."""
    told = takewhile(lambda item: not is_answer(item), islice(said.items, place, None))
    return folded_texts(list(told))


def _told_before(items: list[Item], place: int) -> Iterator[Item]:
    """What was told before a place, the latest first: neither answers nor system prompts."""
    before = map(items.__getitem__, reversed(range(place)))
    return filter(is_input, before)
