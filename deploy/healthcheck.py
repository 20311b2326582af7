# SPDX-License-Identifier: Apache-2.0
"""Exit 0 if the server in this container answers; HEALTH_URL names another address."""

import http.client
import os
import sys
from urllib.parse import urlsplit

url = urlsplit(os.environ.get("HEALTH_URL") or "http://127.0.0.1:8000/health")
try:
    connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=4)
    connection.request("GET", url.path or "/")
    status = connection.getresponse().status
except OSError as error:
    sys.exit(f"{url.geturl()}: {error}")
if status != 200:
    sys.exit(f"{url.geturl()}: HTTP {status}")
