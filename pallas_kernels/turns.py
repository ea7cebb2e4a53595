"""Programs that several threads run take turns.

While one program's first run is recorded as a CUDA graph, another's first run waits for the same stream, which CUDA
forbids: the process aborts (JAX 0.11.2, CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED). Compiling side by side is safe.
"""

from threading import RLock

RUNNING = RLock()
"""Held by a thread while it runs programs, until their results are there."""
