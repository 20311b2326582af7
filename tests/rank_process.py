# SPDX-License-Identifier: Apache-2.0
"""One rank of an engine, from its process group to its builders; run by test_ranks.py.

    python -P tests/rank_process.py JOB RANK

JOB is JSON: sizes of the groups, and cases, each with every rank's environment and
layers. A line of JSON is printed for each case.
"""

import json
import os
import sys
import time

os.environ["TRITON_INTERPRET"] = "1"

import start_tools
import torch
from backend_fakes import make_impl, make_spec, make_vllm_config, modules
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state

from portable_backend import metadata, ranks, start_tuning, tuned
from portable_backend.settings import Settings


def main():
    job, rank = json.loads(sys.argv[1]), int(sys.argv[2])
    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(
            job["tp"] * job["pp"], rank, job["init"], local_rank=rank, backend="gloo"
        )
        parallel_state.initialize_model_parallel(job["tp"], job["pp"], backend="gloo")
    for case in job["cases"]:
        settings = Settings.from_env(case["environ"][rank])
        tuned.get_settings = metadata.settings.get_settings = lambda s=settings: s
        tuned.RANKS_LIMIT_S = case["limit_s"]
        tuned._told = tuned._Told()
        tuned._lookup.cache_clear()
        start_tuning.get_settings = tuned.get_settings
        start_tools.use(setattr, **case.get("tools", {}))
        began = time.monotonic()
        print(json.dumps(start(case, rank, began)), flush=True)
        # Nobody begins the next case before all have ended this one.
        torch.distributed.barrier()


def start(case, rank, began):
    if rank == case.get("dies"):
        os._exit(3)
    time.sleep(case["late_s"] * (rank == 0))
    warnings = []
    ranks.logger.warning = lambda text, *args: warnings.append(text % args)
    pb, planners = modules(), []
    impls = [make_impl(pb, sliding_window=window) for window in case["layers"][rank]]
    config = make_vllm_config(impls)
    for name in config.compilation_config.static_forward_context:
        builder = pb.Builder(make_spec(), [name], config, torch.device("cpu"))
        planners += builder.planners.values()
    configs = [config.to_dict() for p in planners for config in p.configs()]
    return {
        "choices": tuned.choices(),
        "configs": configs,
        "grades": tuned.grades(),
        "warnings": warnings,
        "tuned_s": tuned.tuning_s(),
        "seconds": time.monotonic() - began,
    }


if __name__ == "__main__":
    main()
