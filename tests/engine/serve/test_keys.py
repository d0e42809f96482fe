"""The API keys of a server: their file, and how a request's key is found."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from weft.core.errors import KeyFileError
from weft.engine.serve.keys import ApiKey, make_key_ring

FILE = """
[[key]]
key = "sk-a"
tenant = "research"
weight = 2
trusted = true
max_calls = 3
max_programs = 4
max_body_bytes = 1000

[[key]]
key = "sk-b"
tenant = "research"

[[key]]
key = "sk-c"
"""


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "keys.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_file_gives_each_key_its_tenant_weight_and_limits(tmp_path: Path) -> None:
    """Keys of one tenant share its weight and not their ids; a key without a tenant is one of its own."""
    ring = make_key_ring(file=written(tmp_path, FILE))
    first, second, third = (ring.find([(b"authorization", b"Bearer sk-" + name)]) for name in (b"a", b"b", b"c"))
    assert first is not None
    assert first == ApiKey(first.scope, "research", 2.0, True, 3, 4, 1000)
    assert second is not None
    assert third is not None
    assert (second.tenant, second.weight, second.is_trusted, second.max_calls) == ("research", 2.0, False, None)
    assert third.tenant == "key-3"
    assert len({first.scope, second.scope, third.scope}) == 3
    assert ring.weights == {"research": 2.0}


def test_openais_and_anthropics_header_name_the_same_key() -> None:
    """A client may use both APIs, and its programs are the same in both. Another scheme is that of a proxy."""
    ring = make_key_ring(["sk-a", "sk-b"])
    found = [
        ring.find(headers)
        for headers in (
            [(b"authorization", b"Bearer sk-a")],
            [(b"authorization", b"bearer sk-a"), (b"x-api-key", b"sk-b")],
            [(b"x-api-key", b"sk-a")],
            [(b"authorization", b"Basic dXNlcg=="), (b"x-api-key", b"sk-a")],
        )
    ]
    assert None not in found
    assert len(set(found)) == 1


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [(b"authorization", b"Bearer ")],
        [(b"authorization", b"sk-a")],
        [(b"authorization", b"Bearer sk-A")],
        [(b"authorization", b"Bearer sk-a sk-a")],
        [(b"authorization", b"Bearer \xff\xfe")],
        [(b"authorization", b"Bearer sk-z"), (b"x-api-key", b"sk-a")],
        [(b"authorization", b"Bearer sk-z"), (b"authorization", b"Bearer sk-a")],
        [(b"x-api-key", b"")],
    ],
)
def test_other_credentials_name_no_key(headers: list[tuple[bytes, bytes]]) -> None:
    """Only the first credential counts, and only as a whole."""
    assert make_key_ring(["sk-a"]).find(headers) is None


@pytest.mark.parametrize(
    "headers", [[], [(b"x-api-key", b"any")], [(b"authorization", b"Bearer sk-1")], [(b"authorization", b"\xff")]]
)
def test_without_keys_all_clients_are_one(headers: list[tuple[bytes, bytes]]) -> None:
    """SDKs must send some key. Whoever looks at the server without one sees their programs. No one is trusted."""
    assert make_key_ring().find(headers) == ApiKey("-", tenant=None, is_trusted=False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "key: Field required"),
        ("key = []", "key: List should have at least 1 item"),
        ('[[key]]\nkey = "secret"\nweigth = 2', "key.1.weigth: Extra inputs are not permitted"),
        ('[[key]]\nkey = "secret"\nweight = 0', "key.1.weight"),
        ('[[key]]\nkey = "secret"\ntenant = "t"\nweight = nan', "key.1.weight"),
        ('[[key]]\nkey = "secret"\nmax_calls = "3"', "key.1.max_calls"),
        ('[[key]]\nkey = "secret"\nweight = 2', "Name the tenant"),
        ('[[key]]\ntenant = "secret"', "key.1.key: Field required"),
        ("[[key]]\nkey = 7", "key.1.key"),
        ('[[key]]\nkey = "secret', "is not TOML"),
        ("[[key]]\nkey = secret", "line 2"),
        ('[[key]]\nkey = "secret"\ntenant = "a\\nb"', "API key 1: tenant"),
        ('[[key]]\nkey = "secret secret"', "API key 1 is empty, or"),
        ('[[key]]\nkey = "s\\u00e9cret"', "API key 1 is empty, or"),
        ('[[key]]\nkey = ""', "API key 1 is empty, or"),
        ('[[key]]\nkey = "secret"\n[[key]]\nkey = "secret"', "API key 2 was given before"),
        ('[[key]]\nkey="secret"\ntenant="t"\nweight=1\n[[key]]\nkey="x"\ntenant="t"\nweight=2', "weights 1 and 2"),
    ],
)
def test_a_damaged_file_is_an_error_that_shows_no_key(tmp_path: Path, text: str, said: str) -> None:
    """The server does not start, and the operator is told which entry is wrong, not what its key is."""
    with pytest.raises(KeyFileError) as caught:
        make_key_ring(file=written(tmp_path, text))
    assert said in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    """A missing file, a folder, and one that is no text."""
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name in ("missing", ".", "bytes"):
        with pytest.raises(KeyFileError, match=str(tmp_path)):
            make_key_ring(file=tmp_path / name)


def test_a_key_of_the_command_line_is_not_repeated_in_the_file(tmp_path: Path) -> None:
    """The file would otherwise decide in silence over the other."""
    with pytest.raises(KeyFileError, match="API key 2 was given before"):
        make_key_ring(["sk-a"], written(tmp_path, FILE))


def test_a_file_that_others_may_read_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Secrets that an orchestrator mounts are often readable to all, so it is no error."""
    with caplog.at_level(logging.WARNING):
        make_key_ring(file=written(tmp_path, FILE, 0o644))
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "chmod 600" in caplog.text
        caplog.clear()
        make_key_ring(file=written(tmp_path, FILE, 0o600))
    assert caplog.text == ""


def test_a_key_ring_shows_no_key(tmp_path: Path) -> None:
    """Neither the ring nor its keys hold what a log could show."""
    ring = make_key_ring(["sk-secret"], written(tmp_path, FILE.replace("sk-", "sk-secret-")))
    shown = f"{ring!r} {vars(ring)!r} {list(ring)!r}"
    assert "secret" not in shown
