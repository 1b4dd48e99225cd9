"""What holds for all tests."""

from __future__ import annotations

import signal
import threading

# A shell has what it starts in the background ignore Ctrl-C, and so would all that the tests start and then interrupt.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)
