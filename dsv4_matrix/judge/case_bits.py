"""The bits of a case's answers as its report line keeps them: one digest a tensor and logical row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

from dsv4_matrix.cases.scenario import Observation, Scenario, Step
from dsv4_matrix.judge.bits import as_bits, row_digests, tensor_digest, type_name
from dsv4_matrix.report.bits import CaseBits, Level

#: (tensor, row key, dtype, bytes): keeps a row's raw bits, such as ``RowStore.put`` of a case
Keep = Callable[[str, str, str, bytes], None]
#: Name of the fp32 values that some backends give beside their answers.
SUMS = "accumulators"


def row_keys(step: Step) -> tuple[str, ...]:
    """``r0/p127``: request and position of each row, which stay whatever the batch's layout or padding is."""
    pairs = zip(step.request.tolist(), step.positions.tolist(), strict=True)
    return tuple(f"r{request}/p{position}" for request, position in pairs)


def case_bits(
    scenario: Scenario,
    observations: Sequence[Observation],
    promise: Level,
    *,
    keys: Callable[[Step], Sequence[str]] = row_keys,
    keep: Keep | None = None,
    sums: Mapping[tuple[int, int], Tensor] | None = None,
) -> CaseBits:
    """Digests of ``out`` and ``lse`` of every observation, by ``step 0/replay 2/r0/p127``.

    Args:
        promise: the strongest level that the case's cell declares.
        keys: logical keys of a step's rows; a composition gives its needle the same key wherever that stands.
        keep: where raw bits go, for messages; None keeps none.
        sums: what a row of a step, both by number, kept before it was rounded; digested as ``accumulators``.

    Raises:
        DigestError: keys that are not one a row, or not unique within a step.
    """
    digests: dict[tuple[str, str], str] = {}
    for seen in observations:
        rows = [f"step {seen.step}/{seen.leg}/{key}" for key in keys(scenario.steps[seen.step])]
        for name, tensor in (("out", seen.out), ("lse", seen.lse)):
            digests |= {(name, row): digest for row, digest in row_digests(name, tensor, rows).items()}
            if keep is not None:
                bits = as_bits(tensor)
                for at, row in enumerate(rows):
                    keep(name, row, type_name(tensor), bits[at].numpy().tobytes())
    for (step, at), values in (sums or {}).items():
        row = f"step {step}/eager/{keys(scenario.steps[step])[at]}"
        digests[SUMS, row] = tensor_digest(SUMS, values)
        if keep is not None:
            keep(SUMS, row, type_name(values), as_bits(values).numpy().tobytes())
    return CaseBits(promise, digests)
