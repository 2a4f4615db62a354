"""``python -m common.build``: compiles every kernel of every task."""

import sys

from common.build.cli import main

sys.exit(main())
