"""Profiles of engines: files, and the table of named ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.core.errors import SimulationError
from weft.core.sim import StepTime
from weft.core.sim.study.engine_profile import ENGINES, EngineProfile, engine_named

PROFILE = EngineProfile(
    "measured", StepTime(1e-3, 1e-5, 1e-4, 1e-8, 1e-6), 4096, 1 << 20, batch_size=8, block_tokens=32
)


def test_a_profile_file_reads_as_it_was_written(tmp_path: Path) -> None:
    """All values come back."""
    PROFILE.write(tmp_path / "engine.json")
    assert engine_named(str(tmp_path / "engine.json")) == PROFILE


def test_a_profile_is_an_engine_of_the_simulator() -> None:
    """Its sizes and step times count, and a size that is given goes before the profile's."""
    engine = PROFILE.settings()
    assert (engine.kv_tokens, engine.batch_size, engine.step_time) == (4096, 8, PROFILE.step_time)
    assert engine.block_tokens == 32
    assert (engine.kv_token_bytes, engine.host_kv_tokens) == (1 << 20, 0)
    other = PROFILE.settings(kv_tokens=100, batch_size=4000)
    assert (other.kv_tokens, other.batch_size, other.chunk_tokens) == (100, 4000, 4000)
    assert PROFILE.host_tokens(0.5) == 512


def test_data_sheets_give_plausible_engines() -> None:
    """Larger models are slower, faster memory is quicker, and KV caches hold hundreds of thousands of tokens."""
    small, large = ENGINES["8b-h100"], ENGINES["70b-4xh100"]
    assert small.step_time.fixed_s < ENGINES["8b"].step_time.fixed_s < large.step_time.fixed_s
    assert small.step_time.prefill_token_s < large.step_time.prefill_token_s
    assert all(100_000 < each.kv_tokens < 1_000_000 for each in ENGINES.values())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"weft_profile": 1}', '{"weft_profile": 2, "step_time": 3}'])
def test_another_file_is_refused(tmp_path: Path, text: str) -> None:
    """The error names the file and how to make one."""
    path = tmp_path / "engine.json"
    path.write_text(text)
    with pytest.raises(SimulationError, match=r"engine.json is no profile of an engine.*weft profile"):
        EngineProfile.read(path)


def test_a_name_that_is_neither_an_engine_nor_a_file(tmp_path: Path) -> None:
    """The names of the table are listed."""
    with pytest.raises(SimulationError, match="8b-h100"):
        engine_named(str(tmp_path / "none"))


_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_profile_is_refused_or_read(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever one value becomes, it is read as it stands or refused with a typed error."""
    path = tmp_path / "engine.json"
    PROFILE.write(path)
    found: dict[str, Any] = json.loads(path.read_text())
    inner = data.draw(st.sampled_from([found, found["step_time"]]))
    inner[data.draw(st.sampled_from(sorted(inner)))] = data.draw(_values)
    path.write_text(json.dumps(found))
    try:
        EngineProfile.read(path)
    except SimulationError:
        return
