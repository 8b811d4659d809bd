"""The judge: is each answer right within a budget that its data gives, and would the case notice if it were not?"""

from __future__ import annotations

from dsv4_matrix.judge.judgement import judge
from dsv4_matrix.judge.sight import Kind, applicable_kinds
from dsv4_matrix.judge.verdict import Verdict

__all__ = ["Kind", "Verdict", "applicable_kinds", "judge"]
