"""`weft serve`, and three clients that know nothing of Weft: OpenAI's SDK, curl, and Anthropic's SDK.

Run it with `python examples/serve_clients.py`, or `--model Qwen/Qwen2.5-0.5B-Instruct`. The clients send no ids. Each
asks two questions in one conversation. By the messages, the server finds out that these are three programs of two
calls.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import typer
from anthropic import Anthropic
from openai import OpenAI

from weft.examples._run import Model, tell

QUESTIONS: Final = ("Name a river in Africa.", "And one in Europe?")
TOKENS: Final = 24
KEY: Final = "none"  # the server asks for none, but the SDKs must send one
OPTIONS: Final = ("--host", "127.0.0.1", "--port", "0", "--max-model-len", "2048", "--enforce-eager")
QUIET: Final = ("--uvicorn-log-level", "warning", "--disable-uvicorn-access-log")

# A client gets the server's address and the model's name, and returns its answers.
Client = Callable[[str, str], list[str]]


def openai_sdk(url: str, model: str) -> list[str]:
    """OpenAI's SDK, with a stream for the second answer."""
    with OpenAI(base_url=f"{url}/v1", api_key=KEY) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
        first = client.chat.completions.create(model=model, messages=messages, max_tokens=TOKENS)
        answer = first.choices[0].message.content or ""
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": QUESTIONS[1]}]
        parts = client.chat.completions.create(model=model, messages=messages, max_tokens=TOKENS, stream=True)
        return [answer, "".join(part.choices[0].delta.content or "" for part in parts if part.choices)]


def curl(url: str, model: str) -> list[str]:
    """curl, which posts JSON."""
    program = shutil.which("curl")
    if program is None:
        return ["(there is no curl here)"]
    messages, answers = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        body = json.dumps({"model": model, "messages": messages, "max_tokens": TOKENS})
        command = [program, "--silent", "--fail-with-body", f"{url}/v1/chat/completions", "--json", body]
        answer = subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603  a fixed command
        messages.append(json.loads(answer.stdout)["choices"][0]["message"])
        answers.append(messages[-1]["content"])
    return answers


def anthropic_sdk(url: str, model: str) -> list[str]:
    """Anthropic's SDK, on the Messages API."""
    with Anthropic(base_url=url, auth_token=KEY, api_key=None) as client:
        messages: list[Any] = [{"role": "user", "content": QUESTIONS[0]}]
        first = client.messages.create(model=model, messages=messages, max_tokens=TOKENS)
        messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": QUESTIONS[1]}]
        second = client.messages.create(model=model, messages=messages, max_tokens=TOKENS)
        return ["".join(getattr(block, "text", "") for block in answer.content) for answer in (first, second)]


CLIENTS: Final[dict[str, Client]] = {"OpenAI SDK": openai_sdk, "curl": curl, "Anthropic SDK": anthropic_sdk}


def show_programs(url: str) -> None:
    """What the server knows of the clients' programs."""
    command = [sys.executable, "-m", "weft", "top", url, "--once"]
    tell(f"\n$ weft {' '.join(command[3:])}", "bold")
    subprocess.run(command, check=True)  # noqa: S603  a fixed command


def main(model: Model = None) -> None:
    """Serve a model, let three clients talk to it at once, list their programs, and end the server."""
    name = [] if model is None else [model]
    command = [sys.executable, "-m", "weft", "serve", *name, *OPTIONS, *QUIET]
    tell(f"$ weft {' '.join(command[3:])}", "bold")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})  # noqa: S603  a fixed command
    try:
        assert server.stdout is not None  # noqa: S101  it is a pipe
        ready = next((line for line in server.stdout if " at http" in line), "")
        found = re.match(r"(.+) at (http://\S+)", ready)
        if found is None:
            raise typer.Exit(server.wait() or 1)
        served, url = found.groups()
        tell(f"{served} at {url}\n")
        with ThreadPoolExecutor(len(CLIENTS)) as pool:
            running = {client: pool.submit(talk, url, served) for client, talk in CLIENTS.items()}
        for client, future in running.items():
            for question, answer in zip(QUESTIONS, future.result(), strict=False):
                tell(f"{client}: {question} {' '.join(answer.split())[:80]}")
        show_programs(url)
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    tell(f"the server ended with exit code {code}")


if __name__ == "__main__":
    typer.run(main)
