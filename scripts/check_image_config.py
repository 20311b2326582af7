# SPDX-License-Identifier: Apache-2.0
"""Check what an image declares: `buildah inspect --type image IMAGE` on stdin."""

import json
import sys

inspected = json.load(sys.stdin)
config = inspected["Docker"]["config"]
environment = dict(entry.split("=", 1) for entry in config["Env"])
claims = {
    "runs as 10001": config["User"] == "10001:0",
    "PYTHONSAFEPATH is set": environment["PYTHONSAFEPATH"] == "1",
    "the record layer is set": environment["PORTABLE_BACKEND_CACHE_LAYERS"]
    == "/opt/portable-backend/records",
    "caches are on the volume": all(
        environment[name].startswith("/cache")
        for name in ("HOME", "TRITON_CACHE_DIR", "PORTABLE_BACKEND_CACHE_DIR")
    ),
    "/cache is a volume": "/cache" in config["Volumes"],
    "no secret is in the environment": not any(
        name.endswith(("TOKEN", "SECRET", "PASSWORD", "API_KEY"))
        for name in environment
    ),
    "has a health check": "healthcheck" in str(config.get("Healthcheck")),
    "has an entry point": "entrypoint" in str(config["Entrypoint"]),
    "has OCI labels": {"title", "version", "revision", "licenses", "base.name"}
    <= {name.removeprefix("org.opencontainers.image.") for name in config["Labels"]},
}
broken = [claim for claim, holds in claims.items() if not holds]
sys.exit(f"the image's config is wrong: not so: {'; '.join(broken)}" if broken else 0)
