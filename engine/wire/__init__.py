"""The wire format: the only modules that read or write what travels between the host and vLLM's scheduler process.

- A call carries a `CallHeader` to the scheduler, in `SamplingParams.extra_args` (`vllm_xargs` of a chat request), which
  takes scalars and flat lists: `call_header`.
- Outputs carry a `Report` back, in `RequestOutput.kv_transfer_params`, the one field of an output that a scheduler
  plugin can fill: `reports`.
- Control messages go to the scheduler on a channel of their own (`weft.engine.vllm_compat.control`): `control`, and
  `reports` for what comes back, too.
- The scheduler's own settings reach it in `additional_config["weft"]`: `scheduler_config`.
"""

from weft.engine.wire.call_header import CallHeader

__all__ = ["CallHeader"]
