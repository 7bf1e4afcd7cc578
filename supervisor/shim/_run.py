"""Start of the shim from the source tree; the zipapp has a start of its own. Holds no logic."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    # Last on the path, so that a child mode sees the packages of its own interpreter first.
    del sys.path[0]
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    from supervisor.shim.__main__ import main

    sys.exit(main())
