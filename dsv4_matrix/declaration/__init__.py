"""The declaration: matrix.yaml as frozen typed values. No torch, no triton."""

from dsv4_matrix.declaration.find import find_matrix
from dsv4_matrix.declaration.loader import load_matrix, read_matrix
from dsv4_matrix.declaration.mistakes import DeclarationError, Mistake
from dsv4_matrix.declaration.model import Case, Cell, Matrix, Place, Probe, Refusal, State, Variant

__all__ = [
    "Case",
    "Cell",
    "DeclarationError",
    "Matrix",
    "Mistake",
    "Place",
    "Probe",
    "Refusal",
    "State",
    "Variant",
    "find_matrix",
    "load_matrix",
    "read_matrix",
]
