"""A sound attention backend in plain torch, and a catalogue of defects that can be switched on in it.

It serves the tests of the tester: the harness must pass the sound toy and see every defect. It packs entries in a
layout of its own (584 bytes each, not the production pages), reads nothing but what the protocol gives it, and is slow.

    factory = ToyBackend                     # sound
    factory = broken("window127")            # one defect; names in DEFECTS
"""

# Relative: some tests load this folder under another name.
from .backend import ToyBackend, broken
from .defects import DEFECTS
from .multi_step import ToyMultiStep

__all__ = ["DEFECTS", "ToyBackend", "ToyMultiStep", "broken"]
