"""Commands of ``dsv4-matrix`` with their options, by subject; ``cli`` has ``run`` and what only reads the declaration.

Importing these loads no torch: what a command needs comes when it runs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

GOOD, SHORT, BAD_INPUT = 0, 1, 2

Command = Callable[[argparse.Namespace], int]

#: ``add(name, command, help)`` registers a command, and returns its parser for further arguments.
Add = Callable[[str, Command, str], argparse.ArgumentParser]
