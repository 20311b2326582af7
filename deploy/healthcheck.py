# SPDX-License-Identifier: Apache-2.0
"""Exit 0 if the server in this container answers; HEALTH_URL names another address."""

import http.client
import os
import ssl
import sys
from urllib.parse import urlsplit

address = os.environ.get("HEALTH_URL") or "http://127.0.0.1:8000/health"
try:
    url = urlsplit(address)
    connection: http.client.HTTPConnection
    if url.scheme == "https":
        # The certificate is for the name by which others know this server.
        context = ssl._create_unverified_context()
        connection = http.client.HTTPSConnection(
            url.hostname or "", url.port, timeout=4, context=context
        )
    elif url.scheme == "http":
        connection = http.client.HTTPConnection(url.hostname or "", url.port, timeout=4)
    else:
        raise ValueError("HEALTH_URL must be such as http://127.0.0.1:8000/health")
    connection.request("GET", url.path or "/")
    status = connection.getresponse().status
except (OSError, ValueError, http.client.HTTPException) as error:
    sys.exit(f"{address}: {error or type(error).__name__}")
if status != 200:
    sys.exit(f"{address}: HTTP {status}")
