"""`python -m router`: one router. Any number of them may share the workers."""

from __future__ import annotations

import sys

from router.config import RouterConfig
from router.process import run_router
from runtime.config import load_or_exit

if __name__ == "__main__":
    config = load_or_exit(
        RouterConfig,
        sys.argv[1:],
        prog="python -m router",
        description="Takes requests and dispatches them to workers.",
    )
    sys.exit(run_router(config))
