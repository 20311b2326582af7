# SPDX-License-Identifier: Apache-2.0
"""vLLM's worker, with a cache of tuning records that the first rank alone can read.

For `--worker-cls tensor_parallel_worker.FirstReads`; all others find a file where the
folder should be. VLLM resolves the name in each worker's process.
"""

import os
from typing import Any

from vllm.platforms import current_platform

from portable_backend.settings import get_settings

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class FirstReads(Worker):
    def __init__(self, *args: Any, rank: int, **kwargs: Any) -> None:
        if rank > 0:
            os.environ["PORTABLE_BACKEND_CACHE_DIR"] = __file__
            get_settings.cache_clear()  # this process may be a fork of one that read it
        super().__init__(*args, rank=rank, **kwargs)
