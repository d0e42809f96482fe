"""vLLM's worker on a CPU, for calls with a seed."""

from __future__ import annotations

from typing import Any

from weft.engine.vllm_compat.versions.version import require_vllm

require_vllm()

from vllm.v1.worker.cpu_worker import CPUWorker  # noqa: E402  the version is checked first


class SeededCPUWorker(CPUWorker):
    """Computes a prompt with a seed in several steps, which ends the engine in vLLM 0.32.

    vLLM samples after each part of a prompt, throws the token away, and then rewinds the generator of the call by an
    offset. Generators of a CPU have none. Here a call has no generator while its token is thrown away, so nothing has
    to be rewound. Its other tokens are the same as of a prompt that is computed in one step. vLLM's second model runner
    has no generators.
    """

    def sample_tokens(self, grammar_output: Any) -> Any:
        if self.use_v2_model_runner:
            return super().sample_tokens(grammar_output)
        runner = self.model_runner
        generators = runner.input_batch.generators
        discarded = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0].tolist()
        aside = {row: generators.pop(row) for row in discarded if row in generators}
        try:
            return super().sample_tokens(grammar_output)
        finally:
            generators.update(aside)
