"""LiteLLM's proxy in front of the server, and two agents of OpenAI's SDK at once behind it."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import openai

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "", "parameters": PARAMETERS}}


async def ask(client: openai.AsyncOpenAI, city: str) -> None:
    messages: list[dict[str, object]] = [{"role": "user", "content": f"How is the weather in {city}?"}]
    while True:
        answer = await client.chat.completions.create(model="scripted", messages=messages, tools=[WEATHER])
        message = answer.choices[0].message
        if not message.tool_calls:
            return
        messages.append(message.model_dump(exclude_none=True))
        messages += [{"role": "tool", "tool_call_id": call.id, "content": "warm"} for call in message.tool_calls]


async def main(url: str, key: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key=key) as client:
        await asyncio.gather(*(ask(client, city) for city in ("Rome", "Oslo")[: 1 + (sys.argv[1] == "two at once")]))


with socket.create_server(("127.0.0.1", 0)) as bound:
    port = bound.getsockname()[1]
behind = {"model": "openai/scripted", "api_base": os.environ["OPENAI_BASE_URL"], "api_key": "none"}
config = Path(tempfile.mkdtemp()) / "config.yaml"
key = f"sk-{secrets.token_hex(32)}"  # the proxy does not start without one
models = [{"model_name": "scripted", "litellm_params": behind}]
config.write_text(json.dumps({"model_list": models, "general_settings": {"master_key": key}}))
start = "from litellm import run_server; run_server()"
options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
proxy = subprocess.Popen([sys.executable, "-c", start, *options], stdout=subprocess.DEVNULL)
try:
    while proxy.poll() is None:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health/liveliness").close()
            break
        except OSError:
            time.sleep(0.5)
    asyncio.run(main(f"http://127.0.0.1:{port}/v1", key))
finally:
    proxy.kill()
