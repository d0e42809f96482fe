"""The wheel where vLLM is installed: a real call."""

from __future__ import annotations

import json

import pytest
from installed import Environment

pytestmark = [pytest.mark.package, pytest.mark.engine]

SCRIPT = """
import json, sys
import psutil, weft

@weft.program
def ask(engine, program: weft.Program):
    client = weft.openai_client(engine, program)
    return asyncio.run(client.chat.completions.create(
        model=engine.model, max_tokens=8, messages=[{"role": "user", "content": "Say hello."}]))

def extensions(process):
    return sorted({mapped.path for mapped in process.memory_maps() if "/_csrc" in mapped.path})

if __name__ == "__main__":
    import asyncio
    with weft.Engine(max_model_len=512, enforce_eager=True) as engine:
        answer = ask(engine)
        me = psutil.Process()
        loaded = [extensions(process) for process in (me, *me.children(recursive=True))]
        print(json.dumps({
            "weft": weft.__file__,
            "extensions": sorted({path for paths in loaded for path in paths}),
            "content": answer.choices[0].message.content,
            "tokens": answer.usage.completion_tokens,
            "rows": len(engine.table.ended()),
        }))
"""


def test_a_call_on_a_real_engine(with_engine: Environment) -> None:
    """A program calls the embedded model. The host and the engine's processes have the wheel's extension loaded."""
    script = with_engine.folder / "ask.py"
    script.write_text(SCRIPT)
    done = with_engine.run("python", script, timeout_s=600)
    assert done.code == 0, done.output
    result = json.loads(done.printed)
    site = f"{with_engine.venv}/lib/"
    assert result["weft"].startswith(site)
    assert result["extensions"], "no process has loaded the extension"
    assert all(path.startswith(site) for path in result["extensions"])
    assert 0 < result["tokens"] <= 8
    assert result["content"]
    assert result["rows"] == 1


def test_the_doctor_finds_nothing_wrong(with_engine: Environment) -> None:
    """`weft doctor` of the installed wheel passes every check, vLLM and the scheduler plugin among them."""
    done = with_engine.run("weft", "doctor", timeout_s=300)
    assert done.code == 0, done.output
    assert "scheduler plugin" in done.output
