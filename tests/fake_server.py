# SPDX-License-Identifier: Apache-2.0
"""Stands in for `vllm serve`: answers completions at once, but for planted faults.

fake_server.py FAULTS.json [options of vllm serve]. FAULTS: back end -> {"kind", "at",
"once"}: the fault and the request that meets it, counted from 1; each later one meets
it as well, unless it happens "once" and then in no later server.
"""

import argparse
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("faults", type=Path)
parser.add_argument("--port", type=int)
parser.add_argument("--attention-backend")
args, _ = parser.parse_known_args()
fault = json.loads(args.faults.read_text()).get(args.attention_backend, {})
marker = args.faults.with_name(f"{args.attention_backend}.happened")
if fault.get("kind") == "no start":
    sys.exit("no kernel image is available")
if fault.get("kind") == "slow start":
    time.sleep(600)
count, lock = 0, threading.Lock()


def planted() -> str:
    """The fault that this request meets, or ""."""
    global count
    with lock:
        count += 1
        if count < fault.get("at", 1 << 30) or marker.exists():
            return ""
        if fault.get("once"):
            marker.touch()
        return fault["kind"]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def _send(self, text: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self._send("ok")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = planted()
        if kind == "die":
            print("an illegal memory access was encountered", flush=True)
            os._exit(3)
        if kind == "hang":
            time.sleep(600)
        number = body["max_tokens"] - (kind == "short")
        state = sum(place * token for place, token in enumerate(body["prompt"]))
        if kind == "no context":
            state = body["prompt"][-1]
        tokens = [state % 97 + i for i in range(number)]
        if kind == "other tokens":
            tokens = [token + 1 for token in tokens]
        if body.get("stream"):
            events = [{"choices": [{"token_ids": [token]}]} for token in tokens]
            events.append({"choices": [], "usage": {"completion_tokens": number}})
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            return self._send("".join([*lines, "data: [DONE]\n\n"]))
        choice: dict[str, object] = {"token_ids": tokens}
        if "logprobs" in body:
            best = float("nan") if kind == "nan" else -0.5
            next_best = -0.501 if kind == "no context" else -1.5
            choice["logprobs"] = {
                "top_logprobs": [{"a": best, "b": next_best}] * number
            }
        return self._send(json.dumps({"choices": [choice]}))


ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
