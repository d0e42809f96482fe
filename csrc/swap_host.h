// The swap where the engine's KV cache is in host memory.
#pragma once

#include "swap_params.h"
#include "workers.h"

namespace weft {

// Moves a batch that `check_batch` has passed; all is moved when it returns. Below 4 MiB no other thread is woken.
void swap_host(const SwapLayout &layout, const SwapBatch &batch, Workers &workers);

}  // namespace weft
