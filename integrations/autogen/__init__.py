"""AutoGen: a chat completion client on a Weft engine, and teams that are bound to a program as a whole.

AutoGen runs agents in tasks of its own runtime, so no ambient state says to which program a call belongs. The client
that an agent holds says it: `client.bind(program, agent=...)` makes a client for one agent, and `bind_team` makes one
for each agent of a team.
"""

# ruff: noqa: E402
from weft.integrations import require_packages

require_packages("weft.integrations.autogen", "autogen-core", "autogen-agentchat")

from weft.integrations.autogen.client import WeftChatCompletionClient
from weft.integrations.autogen.client_calls import ClientConfigError
from weft.integrations.autogen.teams import TeamBindingError, bind_team

__all__ = ["ClientConfigError", "TeamBindingError", "WeftChatCompletionClient", "bind_team"]
