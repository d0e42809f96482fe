"""The public names of the integrations, and the places that name a class by its path. Needs no engine."""

from __future__ import annotations

import importlib
import pickle
import re
import sys
from importlib.metadata import distributions

import pytest

from weft.core.errors import MissingPackageError

NAMES = {
    "langchain": ["ChatWeft", "ProgramCallbackHandler"],
    "autogen": ["ClientConfigError", "TeamBindingError", "WeftChatCompletionClient", "bind_team"],
    "fastapi": ["AbortOnDisconnect", "error_response", "event_stream"],
    "openai": ["AsyncTransport", "Transport", "openai_client", "sync_openai_client"],
    "otel": ["WeftSpanProcessor", "openai_client"],
}
REQUIRED = {
    "langchain": "langchain_core",
    "autogen": "autogen_agentchat",
    "openai": "openai",
    "fastapi": "starlette",
    "otel": "opentelemetry.sdk",
}


@pytest.mark.parametrize("framework", NAMES)
def test_public_names(framework: str) -> None:
    """Each package exports its public names, and no others."""
    pytest.importorskip(REQUIRED[framework], reason=f"the {framework} extra is not installed")
    package = importlib.import_module(f"weft.integrations.{framework}")
    assert package.__all__ == NAMES[framework]
    assert all(hasattr(package, name) for name in NAMES[framework])


@pytest.mark.parametrize(
    ("framework", "package", "install"),
    [
        ("langchain", "langchain-core", r"'langchain-core<[\d.]+,>=[\d.]+'"),
        ("autogen", "autogen-core", r"'autogen-core>=[\d.]+'"),
        ("openai", "httpx2", r"'httpx2>=[\d.]+'"),
        ("openai", "openai", r"'openai>=[\d.]+'"),
        ("fastapi", "starlette", "starlette"),
        ("otel", "opentelemetry-sdk", r"'opentelemetry-sdk>=[\d.]+'"),
    ],
)
def test_a_missing_framework_is_a_typed_error(
    framework: str, package: str, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import of an integration without its framework says what to install. Such code catches ImportError."""

    monkeypatch.setattr("weft.integrations.discover", lambda name: [] if name == package else distributions(name=name))
    monkeypatch.delitem(sys.modules, f"weft.integrations.{framework}", raising=False)
    with pytest.raises(MissingPackageError) as caught:
        importlib.import_module(f"weft.integrations.{framework}")
    assert isinstance(caught.value, ImportError)
    expected = f"weft.integrations.{framework} needs {package}: not installed. Run `pip install {install}`."
    assert re.fullmatch(expected, str(caught.value))


def test_autogen_finds_the_client_by_its_provider() -> None:
    """The provider in a component configuration of AutoGen names the client's class."""
    autogen = pytest.importorskip("weft.integrations.autogen", reason="the AutoGen extra is not installed")
    client = autogen.WeftChatCompletionClient
    module, _, name = client.component_provider_override.rpartition(".")
    assert getattr(importlib.import_module(module), name) is client


def test_langchain_names_the_model_by_its_public_path() -> None:
    """The id of the model in LangChain's traces is its public path."""
    langchain = pytest.importorskip("weft.integrations.langchain", reason="the LangChain extra is not installed")
    assert langchain.ChatWeft.lc_id() == ["weft", "integrations", "langchain", "ChatWeft"]


def test_errors_can_be_pickled() -> None:
    """The errors of the AutoGen integration keep their text when they are pickled."""
    autogen = pytest.importorskip("weft.integrations.autogen", reason="the AutoGen extra is not installed")
    for error in (autogen.ClientConfigError(), autogen.TeamBindingError("ann", "has no client.")):
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301  the test's own bytes
        assert type(copy) is type(error)
        assert str(copy) == str(error)
