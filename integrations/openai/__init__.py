"""The OpenAI SDK on a Weft engine, in this process: clients whose transport is the engine instead of HTTP.

::

    client = weft.openai_client(engine, program)
    answer = await client.chat.completions.create(model=engine.model, messages=[...])
    answer.weft  # ids and account of the call

The transport serves `POST /chat/completions`, streaming or not, and `GET /models`. Every call belongs to the program of
its client.
"""

# ruff: noqa: E402
from weft.integrations import require_packages

require_packages("weft.integrations.openai", "openai", "httpx2")

from weft.integrations.openai.transport import AsyncTransport, Transport, openai_client, sync_openai_client

__all__ = ["AsyncTransport", "Transport", "openai_client", "sync_openai_client"]
