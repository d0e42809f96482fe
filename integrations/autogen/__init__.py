"""AutoGen: a chat completion client on a Weft engine, and teams that are bound to a program as a whole.

AutoGen runs agents in its runtime's own tasks, so nothing ambient says which program a call belongs to: the client that
an agent holds does. `client.bind(program, agent=...)` makes one for an agent, `bind_team` one for each agent of a team.
"""

from __future__ import annotations

from weft.integrations.autogen.calls import ClientConfigError
from weft.integrations.autogen.client import WeftChatCompletionClient
from weft.integrations.autogen.teams import TeamBindingError, bind_team

__all__ = ["ClientConfigError", "TeamBindingError", "WeftChatCompletionClient", "bind_team"]
