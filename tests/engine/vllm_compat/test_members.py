"""The tables of vLLM's members hold for the installed vLLM, and they are complete as far as the source can show it."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Collection, Iterator
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm_members import TEST_MEMBERS

from weft.engine.vllm_compat.known_names import CHAT_FIELDS
from weft.engine.vllm_compat.names import ChatCompletionRequest
from weft.engine.vllm_compat.versions.changes import Member, _has, _resolve, change_of
from weft.engine.vllm_compat.versions.members import MEMBERS, Uses, members

pytestmark = pytest.mark.engine  # these tests import vLLM, but start no engine

ROOT = Path(__file__).resolve().parents[3]
COMPAT = ROOT / "engine" / "vllm_compat"
SHIPPED = ("engine", "src/weft/bench", "src/weft/commands", "integrations")
OTHERS = ("tests", "benchmarks")
# `weft.bench.meter` makes a class at run time from a base that is a variable.
VARIABLE_BASES = {"base": "WeftScheduler"}


def test_every_member_is_as_expected() -> None:
    """The installed vLLM has every member, in the form that Weft expects. The failure names all that have changed."""
    listed = members(MEMBERS) + members(TEST_MEMBERS)
    changes = [change for member in listed if (change := change_of(member)) is not None]
    if changes:
        pytest.fail(f"{len(changes)} of {len(listed)} members have changed:\n" + "\n".join(changes), pytrace=False)


def test_the_fields_of_the_chat_request_are_vllms() -> None:
    """A field that vLLM does not know would have no effect, and a field that is missing here could not be set."""
    assert set(ChatCompletionRequest.model_fields) == CHAT_FIELDS


@pytest.mark.parametrize("table", [MEMBERS, TEST_MEMBERS], ids=["MEMBERS", "TEST_MEMBERS"])
def test_no_member_is_listed_twice(table: dict[str, Uses]) -> None:
    """One use of a member is listed, and members are in alphabetical order, so that a member is easy to find."""
    for owner, uses in table.items():
        for how in ("overridden", "imitated", "called", "read", "written", "passed"):
            listed = getattr(uses, how)
            names = listed.split() if isinstance(listed, str) else list(listed)
            assert names == sorted(set(names)), f"{owner}: {how}"
        kept = [member.name for member in uses.members(owner) if member.use != "passed"]
        assert len(kept) == len(set(kept)), owner


def files(*folders: str) -> list[Path]:
    """The Python files of some folders, without the tables themselves."""
    tables = {COMPAT / "members.py", ROOT / "tests/support/vllm_members.py", Path(__file__)}
    return sorted({path.resolve() for folder in folders for path in (ROOT / folder).rglob("*.py")} - tables)


@pytest.mark.parametrize(("table", "folders"), [(MEMBERS, SHIPPED), (TEST_MEMBERS, OTHERS)], ids=["weft", "tests"])
def test_every_listed_member_is_used(table: dict[str, Uses], folders: tuple[str, ...]) -> None:
    """A member that Weft stopped to use leaves the table."""
    words = {word for path in files(*folders) for word in re.findall(r"\w+", path.read_text())}
    assert [member.label for member in members(table) if member.name not in words] == []


def test_every_name_is_used() -> None:
    """A name of vLLM that nothing imports leaves names.py and server_names.py."""
    from weft.engine.vllm_compat import names, server_names

    words = {
        word
        for path in files(*SHIPPED, *OTHERS)
        if path.name not in ("names.py", "server_names.py")
        for word in re.findall(r"\w+", path.read_text())
    }
    offered = (*imports_of(names), *names._FOR_TESTS, *imports_of(server_names))
    assert [name for name in offered if name not in words] == []


@functools.cache
def imports_of(module: ModuleType) -> list[str]:
    """The names that a module imports from vLLM."""
    statements = ast.walk(ast.parse(inspect.getsource(module)))
    of_vllm = [each for each in statements if isinstance(each, ast.ImportFrom) and str(each.module).startswith("vllm")]
    return [alias.name for each in of_vllm for alias in each.names]


# -- members that are used and not listed


class Source(ast.NodeVisitor):
    """Finds uses of vLLM's members in Python source, where the class of an object can be read off the source: in
    subclasses, on parameters with annotations, on names of `names.py`, and in calls of its classes.

    Args:
        subclasses: the base classes of each class, by name, in all sources together.
        own: the members that each class has of its own.
        imported: the names that the source has from vLLM. Other packages have classes of the same names.
    """

    def __init__(self, subclasses: dict[str, list[str]], own: dict[str, set[str]], imported: set[str]) -> None:
        self._subclasses = subclasses
        self._own = own
        self._imported = imported
        self._class: str | None = None
        self._typed: dict[str, Any] = {}
        self.found: list[tuple[Any, str, str]] = []  # class or module of vLLM, member, use

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node.name
        for base in bases(node.name, self._subclasses):
            for item in node.body:
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and _has(base, item.name):
                    self.found.append((base, item.name, "overridden"))
        self.generic_visit(node)
        self._class = outer

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        outer, self._typed = self._typed, dict(self._typed)
        for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs):
            self._typed.pop(argument.arg, None)
            kind = annotated(argument.annotation, self._imported)
            if kind is not None and argument.arg not in narrowed(node):
                self._typed[argument.arg] = kind
        self.generic_visit(node)
        self._typed = outer

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815  the name that ast calls

    def visit_Call(self, node: ast.Call) -> None:
        kind = of_vllm(node.func.id, self._imported) if isinstance(node.func, ast.Name) else None
        if isinstance(kind, type):
            self.found += [(kind, keyword.arg, "passed") for keyword in node.keywords if keyword.arg is not None]
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        if isinstance(node.value, ast.Name):
            owner = self._typed.get(node.value.id) or of_vllm(node.value.id, self._imported)
            if node.value.id == "self":
                self._of_self(node.attr)
            elif owner is not None:
                self.found.append((owner, node.attr, "read"))
        elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", None) == "super":
            self._of_self(node.attr)

    def _of_self(self, name: str) -> None:
        if self._class is None:
            return
        for base in bases(self._class, self._subclasses):
            if _has(base, name) or name not in own_members(self._class, self._subclasses, self._own):
                self.found.append((base, name, "read"))
                return


def of_vllm(name: str, imported: Collection[str] | None = None) -> Any:
    """The class or module of that name in names.py; for an object, such as the platform, its class.

    Args:
        name: the name.
        imported: the names that count; None: all.
    """
    if imported is not None and name not in imported:
        return None
    from weft.engine.vllm_compat import names, server_names

    if name in imports_of(server_names):
        found = getattr(server_names, name)
    elif name in imports_of(names) or name in names._FOR_TESTS:
        found = getattr(names, name)
    else:
        return None
    if isinstance(found, type | ModuleType):
        return found
    return None if callable(found) else type(found)


def annotated(annotation: ast.expr | None, imported: Collection[str]) -> Any:
    """vLLM's class in an annotation `Class`, `"Class"` or `Class | None`."""
    if isinstance(annotation, ast.BinOp):
        return annotated(annotation.left, imported) or annotated(annotation.right, imported)
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return of_vllm(annotation.value, imported)
    return of_vllm(annotation.id, imported) if isinstance(annotation, ast.Name) else None


def narrowed(function: ast.AST) -> set[str]:
    """The variables whose class a function tests; from then on they are of another class."""
    tests = [node for node in ast.walk(function) if isinstance(node, ast.Call) and len(node.args) == 2]
    return {
        node.args[0].id
        for node in tests
        if isinstance(node.func, ast.Name) and node.func.id == "isinstance" and isinstance(node.args[0], ast.Name)
    }


def ancestors(name: str, subclasses: dict[str, list[str]]) -> Iterator[str]:
    """A class and all its bases, by name."""
    yield name
    for base in subclasses.get(name, []):
        yield from ancestors(VARIABLE_BASES.get(base, base), subclasses)


def bases(name: str, subclasses: dict[str, list[str]]) -> list[type]:
    """The classes of vLLM that a class derives from."""
    found = [of_vllm(each) for each in ancestors(name, subclasses)]
    return [each for each in found if isinstance(each, type)]


def own_members(name: str, subclasses: dict[str, list[str]], own: dict[str, set[str]]) -> set[str]:
    """What Weft's part of a class defines."""
    return set().union(*(own.get(each, set()) for each in ancestors(name, subclasses)))


@functools.cache
def imported_from_vllm(tree: ast.Module) -> set[str]:
    """The names that a source imports from vLLM, by way of Weft's list of names or at first hand."""
    return {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("weft.engine.vllm_compat", "vllm"))
        for alias in node.names
    }


def defined(node: ast.ClassDef) -> set[str]:
    """The methods of a class, the names that it annotates or assigns, and the attributes that it assigns to `self`."""
    names: set[str] = set()
    for each in ast.walk(node):
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(each.name)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            names.add(each.id)
        elif isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
            names.add(each.attr)
    return names


def uses_in(sources: list[str]) -> list[tuple[Any, str, str]]:
    """The uses of vLLM's members that can be read off some sources: class or module, member, use."""
    trees = [ast.parse(source) for source in sources]
    subclasses: dict[str, list[str]] = {}
    own: dict[str, set[str]] = {}
    for node in chain.from_iterable(map(ast.walk, trees)):
        if isinstance(node, ast.ClassDef):
            subclasses[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]
            own[node.name] = defined(node)
    found = []
    for tree in trees:
        source = Source(subclasses, own, imported_from_vllm(tree))
        source.visit(tree)
        found += source.found
    return found


def module_of(owner: Any) -> str:
    """The module of a class, or a module's own name."""
    return str(owner.__name__ if isinstance(owner, ModuleType) else owner.__module__)


def unlisted(sources: list[str], listed: list[Member]) -> list[str]:
    """`Class.member (use)` for each use in some sources that is not listed for the class or for a base of it.

    Members that a class of vLLM has from another package, such as pydantic, are left out.
    """
    known = {(_resolve(member.owner), member.name): set[str]() for member in listed}
    for member in listed:
        known[_resolve(member.owner), member.name].add(member.use)
    missing = set()
    for owner, name, use in uses_in(sources):
        line = owner.__mro__ if isinstance(owner, type) else (owner,)
        uses = set().union(*(known.get((each, name), set()) for each in line))
        is_listed = use in uses if use in ("overridden", "passed") else bool(uses - {"passed"})
        of_others = any(hasattr(each, name) for each in line if not module_of(each).startswith("vllm"))
        if not is_listed and not of_others:
            missing.add(f"{owner.__name__}.{name} ({use})")
    return sorted(missing)


def test_every_use_in_weft_is_listed() -> None:
    """What Weft overrides, reads, calls and passes is in MEMBERS."""
    assert unlisted([path.read_text() for path in files(*SHIPPED)], members(MEMBERS)) == []


def test_every_use_in_tests_and_benchmarks_is_listed() -> None:
    """What they override, read, call and pass is in MEMBERS or TEST_MEMBERS."""
    sources = [path.read_text() for path in files(*SHIPPED, *OTHERS)]
    assert unlisted(sources, members(MEMBERS) + members(TEST_MEMBERS)) == []


NAMES = ("AsyncScheduler", "Request", "RequestStatus", "SamplingParams", "kv_transfer_state")
IMPORTS = f"from weft.engine.vllm_compat.names import {', '.join(NAMES)}\n"


@pytest.mark.parametrize(
    ("source", "missing"),
    [
        ("class S(AsyncScheduler):\n  def make_stats(self): ...", "AsyncScheduler.make_stats (overridden)"),
        ("class S(AsyncScheduler): ...\nclass T(S):\n  def reset(self): ...\n  def reset_encoder_cache(self): ...",
         "AsyncScheduler.reset_encoder_cache (overridden)"),
        ("class S(AsyncScheduler):\n  def f(self): return self.log_stats", "AsyncScheduler.log_stats (read)"),
        ("class S(AsyncScheduler):\n  def f(self): super().make_stats()", "AsyncScheduler.make_stats (read)"),
        ("class S(AsyncScheduler):\n  def f(self): return self.no_such", "AsyncScheduler.no_such (read)"),
        ("class S(AsyncScheduler):\n  def f(self): self.policy = 1", "AsyncScheduler.policy (read)"),
        ("def f(request: Request): return request.priority", "Request.priority (read)"),
        ("def f(request: Request | None): request.priority = 1", "Request.priority (read)"),
        ("async def f(request: 'Request'): return request.events", "Request.events (read)"),
        ("SamplingParams(max_tokens=1, top_p=0.5)", "SamplingParams.top_p (passed)"),
        ("RequestStatus.FINISHED_LENGTH_CAPPED", "RequestStatus.FINISHED_LENGTH_CAPPED (read)"),
        ("kv_transfer_state.no_such()", "vllm.distributed.kv_transfer.kv_transfer_state.no_such (read)"),
    ],
)  # fmt: skip
def test_an_unlisted_use_is_found(source: str, missing: str) -> None:
    """The rule sees a use in each form that it knows."""
    assert unlisted([IMPORTS + source], members(MEMBERS)) == [missing]


@pytest.mark.parametrize(
    "source",
    [
        "class S(AsyncScheduler):\n  def f(self): self.own = 1\n  def g(self): return self.own, self.f(), self.running",
        "class S(AsyncScheduler): ...\nclass T(S):\n  own = 1\n  def f(self): return self.own",
        "class S:\n  def f(self): return self.kv_events_config",
        "class S(AsyncScheduler):\n  def schedule(self): return super().schedule()",
        "def f(request: Request): return request.num_tokens",
        "def f(request): return request.priority",
        "def f(request: Request):\n  if isinstance(request, Own): return request.priority",
        "ChatCompletionRequest.model_fields",
        "SamplingParams(max_tokens=1)",
        "RequestStatus.FINISHED_ABORTED",
    ],
)
def test_nothing_else_is_found(source: str) -> None:
    """Listed members, members of Weft's own, and objects whose class is not known are left alone."""
    assert unlisted([IMPORTS + source], members(MEMBERS)) == []


def test_a_class_of_another_package_with_the_same_name_is_left_alone() -> None:
    """FastAPI has a `Request`, too."""
    source = "from fastapi import Request\ndef f(request: Request): return request.priority"
    assert unlisted([source], members(MEMBERS)) == []
