# SPDX-License-Identifier: Apache-2.0
import sys

from portable_backend.bench.cli import main

sys.exit(main())
