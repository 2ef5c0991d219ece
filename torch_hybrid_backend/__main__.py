"""The command `hybrid`, where its script is not on the path: `python -m torch_hybrid_backend`."""

import sys

from torch_hybrid_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
