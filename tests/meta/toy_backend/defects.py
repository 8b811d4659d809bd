"""The catalogue of defects, and how a part of the toy asks whether it has one."""

from __future__ import annotations

from typing import ClassVar

#: Each switchable defect and what it does.
DEFECTS: dict[str, str] = {
    "window127": "the window is one token short",
    "window129": "the window is one token long",
    "window_in_future": "the window ends one position after the row",
    "entry_early": "a compressed entry is attended before it is complete",
    "entry_late": "the newest complete compressed entry is left out",
    "sink_dropped": "the sink is not in the denominator",
    "sink_of_next_head": "sinks are shifted by one head",
    "sink_in_lse": "the log-sum-exp counts the sink",
    "lse_log2": "the log-sum-exp is in base 2",
    "page_row_ignored": "every row reads the page table of the first request",
    "identity_slot_map": "the full location is taken for the SWA slot",
    "map_cached": "the slot map is read once and kept",
    "rejected_entry_visible": "a store of a compressed entry lands one slot further on",
    "rope_lost": "the rope part is not part of the value",
    "scale_of_neighbour": "each group is scaled by the next group's exponent",
    "first_key_clamped": "absent indices are read as slot 0 instead of being skipped",
    "sparse_window127": "only the sparse prefill path has a window of 127",
    "selection_ignored": "the C4 selection is replaced by the newest entries",
    "selection_not_reset": "the C4 selection of the step before stays where the new one is padded",
    "verify_rows_share_first_length": "all verify rows of a request see what the first one sees",
    "extend_rows_from_prefix": "draft-extend rows count from the total length on",
    "draft_positions_not_advanced": "every draft step sees the committed prefix only",
    "draft_steps_share_slot": "every draft step writes the slot of the first",
    "stale_graph_buffer": "replay preparation rebuilds the metadata into new tensors",
    "stale_row_when_shrinking": "replay preparation refreshes the live rows only",
    "length_frozen_in_graph": "the longest length of the capture stays a Python number in the graph",
    "pad_writes_live_slot": "pad rows store into a live slot",
    "pad_leaks": "what pad rows hold is mixed into live rows at weight zero",
    "out_loc_cached_while_idle": "the store location is refreshed only while the rank has requests",
    "host_sync_in_graph": "the captured step reads a length on the host",
    "host_sync_swallowed": "the captured step reads a length on the host and hides the error",
    "attention_outside_graph": "the attention is not captured, so that a replay leaves the output as it is",
    "input_written": "the query is negated in place once it has been used",
    "table_written": "the request table is written",
    "dummy_written": "pad rows store into the dummy slot",
    "q_stride_ignored": "a strided query is read as if it were contiguous",
    "page_table_cached": "the page table of a request row is read once and kept",
    "wrong_dtype": "the output is float32",
    "wrong_shape": "the output has an extra dimension",
    "lse_missing": "only the output is returned",
    "nan_output": "one element of the output is NaN",
    "raises": "forward raises",
    "refuses_nothing": "no argument is refused",
    "refuses_wrongly": "refusals have another type",
    "dead_after_refusal": "a refused call leaves the backend unusable",
}


class Defective:
    """What every part of the toy inherits: its switched-on defects, and refusals that two of them change."""

    defects: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def has(cls, defect: str) -> bool:
        return defect in cls.defects

    @classmethod
    def _refuse(cls, kind: type[Exception], message: str) -> None:
        if cls.has("refuses_nothing"):
            return
        raise (RuntimeError if cls.has("refuses_wrongly") else kind)(message)
