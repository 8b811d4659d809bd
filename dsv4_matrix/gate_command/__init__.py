"""The command ``dsv4-matrix gate``: ``session`` starts two runs, each run is a ``child``, and has ``workers``.

What the runs differ in and how they are compared is in ``gate``, which knows neither cases nor backends.
"""

from __future__ import annotations
