"""``python -m blr_kernels.bench``: the layer benchmark."""

from __future__ import annotations

import sys

from blr_kernels.bench.command import main

if __name__ == "__main__":
    sys.exit(main())
