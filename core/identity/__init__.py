"""Which program a request over HTTP belongs to: by the ids that it carries, or by the messages that it continues."""

from __future__ import annotations

from weft.core.identity.sources import Evidence, Identity, Source, identity_of

__all__ = ["Evidence", "Identity", "Source", "identity_of"]
