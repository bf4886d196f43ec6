"""``python -m diptych`` is the ``diptych`` command."""

import sys

from diptych.cli import main

sys.exit(main())
