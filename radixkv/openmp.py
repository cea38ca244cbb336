"""How the threads of an operator wait for each other."""

from __future__ import annotations

import os
from collections.abc import MutableMapping

__all__ = ["set_wait_policy"]

# Some 50 us. Measured on two cores, milliseconds of a decode step of one sequence and of eight:
# 48 and 92 without spinning, 29 and 69 with this, 31 and 73 with OpenMP's default of 300,000;
# beside two other busy processes 52 and 124, 65 and 147, 110 and 270.
SPIN_COUNT = 20_000


def set_wait_policy(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let threads spin briefly at a barrier before they sleep, unless `environ` says else.

    An operator on a few rows is over in microseconds, less than it takes to wake a thread; and
    threads that spin for long take the core from whatever has it (the event loop, a client).
    Read when torch is loaded: to be called before.
    """
    if "OMP_WAIT_POLICY" not in environ:
        environ.setdefault("GOMP_SPINCOUNT", str(SPIN_COUNT))
