"""The command line and its commands."""

import logging

logging.basicConfig(level=logging.ERROR)  # before Beam is imported: it warns of optional packages
