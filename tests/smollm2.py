# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct in Hugging Face's form, converted once and kept."""

import importlib.util
import os
import sys
from pathlib import Path

QUICKSTART = Path(__file__).resolve().parents[1] / "scripts" / "quickstart.py"


def model_dir() -> Path:
    """The model's folder: PORTABLE_BACKEND_TEST_MODEL, or made by the quick start.

    Raises:
        RuntimeError: the package that holds the weights, or a module that reads them,
            cannot be had.
    """
    given = os.environ.get("PORTABLE_BACKEND_TEST_MODEL")
    if given:
        return Path(given)
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    assert spec is not None
    assert spec.loader is not None
    quickstart = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = quickstart  # dataclasses look their module up
    spec.loader.exec_module(quickstart)
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    target = base / "portable_backend" / "test" / "smollm2-135m-instruct"
    try:
        return quickstart.convert_model(target)
    except quickstart.QuickstartError as error:
        raise RuntimeError(str(error)) from error
