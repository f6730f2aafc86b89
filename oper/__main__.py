"""``python -m oper``: the same as the ``oper`` command (use it under torchrun)."""

import sys

from oper.cli import main

if __name__ == "__main__":
    sys.exit(main())
