"""`python -m hf_private.cli`, where the console script is not on the path."""

import sys

from .main import main

sys.exit(main())
