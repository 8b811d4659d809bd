"""The site of a cell that has none of its own: the cell's step, call by call, as a covered cell would run it.

Where the backend refuses is its own choice: the first call that raises is the one that refuses, and what the calls
before it wrote is no fault. If all go through, the cell works.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch

from dsv4_matrix.cases.batch import DRAFT_RUNNER, FORWARD_MODES
from dsv4_matrix.declaration.drives import DRIVES
from dsv4_matrix.modes.capture import Outputs, capture
from dsv4_matrix.modes.rig import Rig
from dsv4_matrix.modes.sites import Arranged, Refused
from dsv4_matrix.modes.step import StepInputs, calls_behind_metadata, run_captured_step, store_and_attend
from dsv4_matrix.protocol import AttentionBackend, ForwardMode, MultiStepDraftBackend

_DRAFT_STEPS = 3
#: Rows of each request of the tried step, by the forward of a variant.
_ROWS = {"extend": 2, "decode": 1, "target-verify": 4, "draft-extend": 2}


@dataclass(frozen=True)
class OwnStep:
    """One way in which a mode runs its step; a site like ``sites.Site``.

    Attributes:
        call: what is called, for messages.
        arranged: makes what comes before, which must succeed, and returns the calls, one of which must refuse.
        prefill_path: of the runner.
    """

    call: str
    arranged: Callable[[Rig], Arranged]
    prefill_path: str = "auto"


def own_steps(mode: str) -> tuple[OwnStep, ...]:
    """Every way in which cells of ``mode`` run: none of them may go through while the cell is not covered."""
    if mode == DRAFT_RUNNER:
        return (OwnStep(f"the captured chain of {_DRAFT_STEPS} draft steps", _captured_chain),)
    ways = []
    for forward in DRIVES[mode].forwards:
        inputs = partial(_inputs, forward=forward)
        if DRIVES[mode].graph:
            ways.append(OwnStep(f"the captured {forward} step", partial(_captured, inputs_of=inputs)))
        elif forward == "extend":
            ways += [
                OwnStep(f"the eager extend step, {path} path", partial(_eager, inputs_of=inputs), path)
                for path in ("dense", "sparse")
            ]
        else:
            ways.append(OwnStep(f"the eager {forward} step", partial(_eager, inputs_of=inputs)))
    return tuple(ways)


def _inputs(rig: Rig, forward: str) -> StepInputs:
    return rig.step_inputs(rig.batch(FORWARD_MODES[forward], rows=_ROWS[forward]), rig.ratio)


def _eager(rig: Rig, inputs_of: Callable[[Rig], StepInputs]) -> Arranged:
    backend, inputs = rig.backend, inputs_of(rig)
    metadata = partial(backend.init_forward_metadata, inputs.batch)
    return Arranged((metadata, *calls_behind_metadata(backend, inputs)), backend.kv_buffers)


def _captured(rig: Rig, inputs_of: Callable[[Rig], StepInputs]) -> Arranged:
    """The step once by itself, so that its calls can be told apart, then captured and replayed."""
    backend, inputs = rig.backend, inputs_of(rig)
    batch = inputs.batch

    def record_and_replay() -> None:
        after, step = backend.on_after_cuda_graph_warmup, partial(_outputs, backend, inputs)
        graph = capture(step, after_warmup=after, device=rig.device)
        backend.init_forward_metadata_out_graph(batch)
        graph.replay()

    calls: tuple[Refused, ...] = (
        partial(backend.init_cuda_graph_state, batch.batch_size, len(batch.positions)),
        partial(backend.init_forward_metadata_out_graph, batch, in_capture=True),
        partial(backend.init_forward_metadata_in_graph, batch),
        *calls_behind_metadata(backend, inputs),
        record_and_replay,
    )
    return Arranged(calls, backend.kv_buffers)


def _outputs(backend: AttentionBackend, inputs: StepInputs) -> Outputs:
    return (run_captured_step(backend, inputs),)


def _captured_chain(rig: Rig) -> Arranged:
    chain = _Chain(rig)
    forwards = tuple(partial(chain.forward, step) for step in range(_DRAFT_STEPS - 1))
    return Arranged((chain.build, chain.prepare, chain.metadata, *forwards, chain.record_and_replay), chain.buffers)


class _Chain:
    """A draft of two requests, whose backends exist once they are built."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.multi: MultiStepDraftBackend | None = None
        decode = rig.batch(ForwardMode.DECODE)
        chain = rig.batch(ForwardMode.EXTEND, rows=_DRAFT_STEPS)
        committed = decode.seq_lens - 1
        # Made here: nothing may be brought to a device inside a capture.
        self.inputs = rig.step_inputs(decode, rig.ratio)
        self.batch = replace(
            decode,
            seq_lens=committed,
            seq_lens_cpu=committed.tolist(),
            positions=committed.clone(),
            out_cache_loc=chain.out_cache_loc,
        )

    def buffers(self) -> dict[str, torch.Tensor]:
        return dict(self.multi.attn_backends[0].kv_buffers()) if self.multi else {}

    def build(self) -> None:
        rig = self.rig
        self.multi = rig.factory.multi_step(rig.runner, num_steps=_DRAFT_STEPS, compress_ratio=rig.ratio)

    @property
    def built(self) -> MultiStepDraftBackend:
        assert self.multi is not None
        return self.multi

    def prepare(self) -> None:
        self.built.init_cuda_graph_state(self.batch.batch_size, self.batch.batch_size)
        self.built.init_forward_metadata_out_graph(self.batch, in_capture=True)

    def metadata(self) -> None:
        self.built.init_forward_metadata_in_graph(self.batch)

    def forward(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = self.built.step_batch(self.batch, step)
        return store_and_attend(self.built.attn_backends[step], replace(self.inputs, batch=batch))

    def record_and_replay(self) -> None:
        def chain() -> Outputs:
            self.metadata()
            return tuple(self.forward(step) for step in range(_DRAFT_STEPS - 1))

        graph = capture(chain, after_warmup=self.built.on_after_cuda_graph_warmup, device=self.rig.device)
        self.built.init_forward_metadata_out_graph(self.batch)
        graph.replay()
