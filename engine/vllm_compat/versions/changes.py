"""Whether a member of a vLLM class is still what Weft expects, found without an instance of the class."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import pkgutil
import re
import textwrap
from enum import Enum
from functools import cache
from types import FunctionType, ModuleType
from typing import Any, Final, Literal, NamedTuple

from weft.engine.vllm_compat.versions.version import is_older

# Modules by their older names, and where later versions have them.
MOVED: Final = {"vllm.entrypoints.launchers.cli_args": "vllm.entrypoints.common.cli_args"}  # since 0.33

Signature = str | tuple[str, ...] | None  # one for each form that versions have; None: the member is not callable
Use = Literal["overridden", "imitated", "called", "read", "written", "passed"]


class Member(NamedTuple):
    """One member of a class or module of vLLM, and how Weft uses it."""

    owner: str  # the full name of the class or module
    name: str
    use: Use
    signature: Signature = None
    since: str | None = None  # the first minor version that has it; None: each version that Weft supports

    @property
    def label(self) -> str:
        """`Class.member`, or `Class(keyword=)` for an argument of the constructor."""
        owner = self.owner.rpartition(".")[2]
        return f"{owner}({self.name}=)" if self.use == "passed" else f"{owner}.{self.name}"


def change_of(member: Member) -> str | None:
    """A sentence that begins with the member's label and says how the installed vLLM differs; None if it does not."""
    if member.since is not None and is_older(member.since):
        return None
    try:
        owner = _resolve(member.owner)
    except (ImportError, AttributeError) as error:
        difference: str | None = f"is missing, since {member.owner} cannot be imported ({error})"
    else:
        difference = _difference(owner, member)
    return None if difference is None else f"{member.label} ({member.use}) {difference}."


@cache
def _resolve(owner: str) -> Any:
    for name, later in MOVED.items():
        if owner.startswith(name) and importlib.util.find_spec(name) is None:
            return pkgutil.resolve_name(owner.replace(name, later, 1))
    return pkgutil.resolve_name(owner)


def _difference(owner: Any, member: Member) -> str | None:
    if member.use == "passed":
        is_accepted = member.name in inspect.signature(owner).parameters
        return None if is_accepted else "is missing: the constructor has no such parameter"
    if not _has(owner, member.name):
        return "is missing"
    found = inspect.getattr_static(owner, member.name, None)
    if member.signature is not None:
        forms = (member.signature,) if isinstance(member.signature, str) else member.signature
        differences = [_signature_difference(form, found, is_called=member.use == "called") for form in forms]
        return None if None in differences else differences[-1]
    if member.use in ("read", "written") and not isinstance(owner, ModuleType):
        return _attribute_difference(owner, found, is_written=member.use == "written")
    return None


def _has(owner: Any, name: str) -> bool:
    if isinstance(owner, ModuleType):
        return hasattr(owner, name)
    return any(name in vars(base) or name in _instance_attributes(base) for base in owner.__mro__)


@cache
def _instance_attributes(kind: type) -> frozenset[str]:
    """The attributes that a class annotates (so do dataclasses, msgspec structs and pydantic models with their fields),
    and those that its methods assign to `self`. Base classes do not count."""
    names = set(vars(kind).get("__annotations__", ()))
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):  # the class is not written in Python
        return frozenset(names)
    (definition,) = ast.parse(textwrap.dedent(source)).body
    for function in getattr(definition, "body", ()):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and function.args.args:
            first = function.args.args[0].arg
            names |= {
                node.attr
                for node in ast.walk(function)
                if isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and isinstance(node.value, ast.Name)
                and node.value.id == first
            }
    return frozenset(names)


def _attribute_difference(owner: Any, found: Any, *, is_written: bool) -> str | None:
    if isinstance(found, FunctionType | classmethod | staticmethod):
        return "is a method now"
    if is_written:
        params = getattr(owner, "__dataclass_params__", None)
        if (isinstance(found, property) and found.fset is None) or (params is not None and params.frozen):
            return "can no longer be assigned"
    return None


def _signature_difference(expected: str, found: Any, *, is_called: bool) -> str | None:
    function = found.__func__ if isinstance(found, classmethod | staticmethod) else found
    if not callable(function):
        return "is not callable any more"
    signature = inspect.signature(function)
    text = _text(signature)
    parameters, _, returned = expected.partition(" -> ")
    if not returned:
        signature = signature.replace(return_annotation=signature.empty)
    if is_called or parameters.endswith(", ...)"):  # optional parameters that Weft does not name are no difference
        named = set(re.findall(r"\w+", parameters))
        used = [each for each in signature.parameters.values() if each.name in named or not _is_optional(each)]
        signature = signature.replace(parameters=used)
        parameters = parameters.replace(", ...)", ")")
    if _text(signature) == (f"{parameters} -> {returned}" if returned else parameters):
        return None
    return f"has the signature {text}; Weft expects {expected}"


def _is_optional(parameter: inspect.Parameter) -> bool:
    variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return variadic or parameter.default is not parameter.empty


def _text(signature: inspect.Signature) -> str:
    """A signature without the types of its parameters, and with the returned type as source code would name it."""
    parameters = [
        each.replace(annotation=each.empty, default=each.empty if each.default is each.empty else _Shown(each.default))
        for each in signature.parameters.values()
    ]
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    returned = signature.return_annotation
    if returned is signature.empty:
        return text
    name = returned if isinstance(returned, str) else inspect.formatannotation(returned)
    without_modules = re.sub(r"[A-Za-z_]\w*[.](?=\w)", "", name)
    unquoted = without_modules.replace("'", "").replace('"', "")
    return f"{text} -> {unquoted}"


class _Shown:
    """A default value as a signature shows it: a constant as it is written, an object without its address."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, Enum):
            return f"{type(self._value).__name__}.{self._value.name}"
        text = repr(self._value)
        return f"<{type(self._value).__name__}>" if " at 0x" in text else text
