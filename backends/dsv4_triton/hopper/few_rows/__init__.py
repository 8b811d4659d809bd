"""Few rows on Hopper, each shared among many programs, by two kernels one behind the other.

First scores: ``score``, or ``score_once`` where every block of keys has a program. Then weights of them, and sums:
``add`` for least time, ``stream`` for more rows.
"""
