"""Reading who a request belongs to, and what its client says of it."""

from __future__ import annotations

from weft.core.log import get_logger
from weft.engine.vllm_compat.names import Request
from weft.engine.wire.calls import CallHeader, decode_call, figures_of


class HeaderReader:
    """Reads the header of each request that arrives, and warns once of figures that it does not believe.

    Args:
        trusts_clients: Whether figures, such as a program's service, are taken from every client.
    """

    def __init__(self, *, trusts_clients: bool) -> None:
        self._trusts_clients = trusts_clients
        self._has_warned = False

    def read(self, request: Request) -> CallHeader:
        """A request's header. A request that names no program is a program of its own."""
        params = request.sampling_params
        extra_args = params.extra_args if params is not None else None
        self._warn_of_figures(extra_args)
        return decode_call(extra_args, request.request_id, request.session_id, is_trusted=self._trusts_clients)

    def _warn_of_figures(self, extra_args: object) -> None:
        if not self._trusts_clients and not self._has_warned and (figures := figures_of(extra_args)):
            self._has_warned = True
            get_logger().warning(
                "a client sent figures, and they were ignored, because clients are not trusted here; to trust all "
                'clients, add "trust_clients": true to "weft" in additional_config. This is logged once',
                figures=", ".join(figures),
            )
