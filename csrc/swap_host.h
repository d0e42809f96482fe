// The host kernel: the swap of an engine whose KV cache is in host memory, as vLLM's is on a CPU. Several threads share
// a large batch.
#pragma once

#include "swap_params.h"
#include "workers.h"

namespace weft {

// Moves a batch that `check_batch` has accepted. Every byte has been copied when it returns. The calling thread copies
// batches below 4 MiB alone.
void swap_host(const SwapLayout &layout, const SwapBatch &batch, Workers &workers);

}  // namespace weft
