"""The environment of a deterministic run: owned by a launcher, applied by rule, attested inside the workers.

A variable that is set after its reader has started does nothing: ``PYTHONHASHSEED`` in a running interpreter changes
only that interpreter's children. So the parent decides everything before a child's interpreter exists (``launch``), and
what the child found is reported and compared (``attest``). No torch here.
"""

from __future__ import annotations

from dsv4_matrix.environment.apply import (
    Applied,
    ConflictError,
    EnvironmentValueError,
    Setting,
    TooLateError,
    apply,
    apply_in_process,
    forward,
)
from dsv4_matrix.environment.attest import Attestation, attest, disagreements
from dsv4_matrix.environment.launch import Launch, launch, prepare
from dsv4_matrix.environment.profile import Before, EnvVar, Mode, Profile
from dsv4_matrix.environment.profiles import NCCL, SGLANG, SUITE

__all__ = [
    "NCCL",
    "SGLANG",
    "SUITE",
    "Applied",
    "Attestation",
    "Before",
    "ConflictError",
    "EnvVar",
    "EnvironmentValueError",
    "Launch",
    "Mode",
    "Profile",
    "Setting",
    "TooLateError",
    "apply",
    "apply_in_process",
    "attest",
    "disagreements",
    "forward",
    "launch",
    "prepare",
]
