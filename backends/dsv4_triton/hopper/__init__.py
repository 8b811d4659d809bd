"""Sparse FP8 attention for Hopper in Gluon: ``launch`` takes calls that ``choice`` gives it.

``kernel`` and its roles ``scores`` and ``sums`` serve many rows, ``few_rows`` a few, with the same bits. Both build on
``layouts``, ``items`` (which keys are whose), ``notes`` (where they are), ``keys`` (bytes to bf16) and ``softmax``.
"""
