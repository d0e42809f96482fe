"""How much of real clients' prompts the KV cache holds: their recorded requests, sent again to `weft serve` on a model.

`make test-clients` with `WEFT_RECORD_CLIENTS=FOLDER` records what Claude Code and Codex send while a script answers.
Here a tiny random model gets the same requests, one after the other, each with the script's answers in its history. The
model itself answers otherwise, so the text of each answer is computed again with the next request, which a real model
would not need: the shares are lower bounds.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import httpx
import typer
from http_servers import Capacity, weft_server

from weft.engine.models.tiny import make_tiny_llama

_CAPACITY = Capacity(slots=4, kv_tokens=131_072, chunk_tokens=8_192, max_model_len=65_536)
_OPTIONS = (
    *("--hf-overrides", json.dumps({"max_position_embeddings": _CAPACITY.max_model_len})),
    *("--enable-prompt-tokens-details", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
)
_LIMITS = {"/v1/messages": "max_tokens", "/v1/responses": "max_output_tokens"}
_AGENTS = ("x-claude-code-agent-id", "thread-id")


def turns(recording: Path) -> Iterator[tuple[str, dict[str, str], dict[str, Any]]]:
    """The path, headers and body of each request of a model, in the order of their arrival."""
    records = sorted(map(json.loads, recording.read_text().splitlines()), key=lambda each: each["begin_s"])
    for record in records:
        if record["path"] in _LIMITS:
            headers = {name: text for name, text in record["headers"] if name not in ("host", "content-length")}
            body = json.loads(record["body"])
            yield record["path"], headers, {**body, "model": "tiny", "stream": False, _LIMITS[record["path"]]: 4}


def usage_of(answer: dict[str, Any]) -> tuple[int, int]:
    """The tokens of a request's prompt, and those that were in the KV cache."""
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:  # Anthropic counts apart what is read from a cache and what is written to it
        cached = usage["cache_read_input_tokens"] or 0
        return usage["input_tokens"] + (usage.get("cache_creation_input_tokens") or 0) + cached, cached
    return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]


def main(recordings: Annotated[list[Path], typer.Argument(help="Of the clients' cases, each one a file.")]) -> None:
    """Print a line of JSON for each request, and for the later turns of all agents of a recording."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "model")
        with (
            weft_server(model, _CAPACITY, Path(folder) / "log", *_OPTIONS) as address,
            httpx.Client(base_url=address, timeout=600) as client,
        ):
            for recording in recordings:
                agents: dict[str, int] = {}
                later = [0, 0]
                for path, headers, body in turns(recording):
                    answer = client.post(path, headers=headers, json=body).raise_for_status().json()
                    prompt, cached = usage_of(answer)
                    agent = next((headers[name] for name in _AGENTS if name in headers), "")
                    turn = agents[agent] = agents.get(agent, 0) + 1
                    if turn > 1:
                        later = [later[0] + prompt, later[1] + cached]
                    found = {"agent": list(agents).index(agent), "turn": turn, "prompt": prompt, "cached": cached}
                    typer.echo(json.dumps({"recording": recording.stem, **found}))
                share = round(later[1] / later[0], 4) if later[0] else None
                typer.echo(json.dumps({"recording": recording.stem, "cached_share_of_later_turns": share}))


if __name__ == "__main__":
    typer.run(main)
