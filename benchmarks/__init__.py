"""Benchmarks of the engine and the training of its small checkpoint."""

import signal
import sys

if sys.argv[0] == "-m":  # a command is about to import what it needs, for seconds: until then Ctrl-C just ends it
    signal.signal(signal.SIGINT, signal.SIG_DFL)
