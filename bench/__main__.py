"""python -m bench <suite>."""

import sys

from .cli import main

sys.exit(main())
