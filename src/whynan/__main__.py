"""`python -m whynan`."""

import sys

from whynan.commands.main import main

sys.exit(main())
