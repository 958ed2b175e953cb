"""`python -m whynan`."""

import os
import sys

if sys.path[0] == os.getcwd():  # where `-m` looks first: a file there can have the name of a library of ours
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))

from whynan.commands.main import main

sys.exit(main())
