# SPDX-License-Identifier: Apache-2.0
"""Methods added to vLLM's workers, to see from outside what they run and have run.

Pass this class's full name to `--worker-extension-cls`. Call the methods through
`LLM.collective_rpc`, or with VLLM_SERVER_DEV_MODE=1 through `POST /collective_rpc`.
"""

from typing import Any


class PortableWorkerExtension:
    """Mixed into the worker class; every name starts with portable_."""

    def portable_launch_counts(self) -> dict[str, int]:
        """Launches of each kernel in this worker; graph replays count too.

        Waits for the device, so it does not belong in a serving loop.
        """
        from portable_backend.kernels import launch_counts

        return launch_counts()

    def portable_choices(self) -> dict[str, Any]:
        """What this worker's attention runs with; ranks should differ in tune_s alone.

        Returns:
            "choices", a hash of all configs; "grades", by kernel how many of the keys
            looked up got which grade; "tune_s", seconds that this worker has tuned for;
            "background", how far tuning beside the engine is, where there is one.
        """
        from portable_backend import tuned
        from portable_backend.settings import get_settings

        background = {}
        if get_settings().tune == "background":
            from portable_backend import background_tuning

            background = background_tuning.status()
        return {
            "choices": tuned.choices(),
            "grades": tuned.grades(),
            "tune_s": tuned.tuning_s(),
            "background": background,
        }

    def portable_reset_launch_counts(self) -> None:
        """Set every count of this worker to zero."""
        from portable_backend.kernels import reset_launch_counts

        reset_launch_counts()
