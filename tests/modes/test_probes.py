"""Probes: kept promises pass, and each way of breaking one is explained with the edit to make."""

from dataclasses import replace

import pytest

from dsv4_matrix.declaration.model import Case, Probe, State
from dsv4_matrix.declaration.sites import CALL_SITES, OWN_STEP
from dsv4_matrix.modes.probes import SITES, ProbeFailed, run_probe


def probes(matrix):
    return [case for case in matrix.cases() if case.probe is not None]


def test_every_site_is_probed(matrix):
    assert {case.probe.site for case in probes(matrix)} - {OWN_STEP} == set(SITES) == set(CALL_SITES) - {OWN_STEP}


def test_the_sound_toy_keeps_every_promise(toy, matrix):
    for case in probes(matrix):
        run_probe(case, matrix, toy.ToyBackend, "cpu")


def test_no_promise_is_kept_by_a_backend_that_refuses_nothing(toy, matrix):
    kept = []
    for case in probes(matrix):
        try:
            run_probe(case, matrix, toy.broken("refuses_nothing"), "cpu")
        except ProbeFailed:
            continue
        kept.append(case.id)
    assert kept == []


def probe_of(matrix, cell_id):
    return next(case for case in probes(matrix) if case.cell_id == cell_id)


def failure(case, matrix, factory):
    with pytest.raises(ProbeFailed) as caught:
        run_probe(case, matrix, factory, "cpu")
    return str(caught.value)


def test_success_names_the_place_and_the_edit(toy, matrix):
    case = probe_of(matrix, "r4/eagle-draft-runner")
    text = failure(case, matrix, toy.broken("refuses_nothing"))
    assert "went through; a refusal was due" in text
    assert case.id not in text  # the screen around it has it
    assert f"matrix.yaml:{case.cell.place.line}:" in text
    assert case.reason in text
    assert "restore it" in text


def test_a_deferred_cell_that_works_says_promote(toy, matrix):
    case = probe_of(matrix, "r4/eagle-draft-runner")
    deferred = replace(case, cell=replace(case.cell, state=State.DEFERRED))
    text = failure(deferred, matrix, toy.broken("refuses_nothing"))
    assert "promote it. Set `state: covered` for r4/eagle-draft-runner" in text


def test_another_type_fails_even_if_the_message_fits(toy, matrix):
    text = failure(probe_of(matrix, "r0/pcg-extend"), matrix, toy.broken("refuses_wrongly"))
    assert "raised another type" in text
    assert "RuntimeError: unsupported forward_mode=extend" in text
    assert "expected NotImplementedError" in text


def test_a_subclass_is_another_type(matrix, toy):
    class NarrowerError(NotImplementedError):
        pass

    class Refusing(toy.ToyBackend):
        def init_forward_metadata_out_graph(self, batch, *, in_capture=False):
            raise NarrowerError("unsupported forward_mode=extend")

    assert "raised another type" in failure(probe_of(matrix, "r0/pcg-extend"), matrix, Refusing)


def test_another_message_fails(toy, matrix):
    case = probe_of(matrix, "r0/pcg-extend")
    text = failure(replace(case, probe=replace(case.probe, match="no such words")), matrix, toy.ToyBackend)
    assert "another message" in text
    assert "edit `match`" in text


def test_a_backend_that_a_refusal_breaks_fails(toy, matrix):
    case = probe_of(matrix, "r4/de-eager")
    assert "afterwards an eager decode gave" in failure(case, matrix, toy.broken("dead_after_refusal"))


def test_a_refusal_after_writing_fails(toy, matrix):
    class Late(toy.ToyBackend):
        def forward(self, q, batch, compress_ratio, attn_sink):
            self.pools["swa"][1, 0] ^= 1
            return super().forward(q, batch, compress_ratio, attn_sink)

    text = failure(probe_of(matrix, "r4/de-eager"), matrix, Late)
    assert "1 cache bytes had changed" in text


def test_a_backend_that_fails_on_the_way_to_the_site_is_not_taken_for_a_refusal(toy, matrix):
    class Early(toy.ToyBackend):
        def init_forward_metadata(self, batch):
            raise ValueError("draft layer is SWA-only")

    text = failure(probe_of(matrix, "r4/de-eager"), matrix, Early)
    assert "before it was brought to" in text
    assert "only the call itself may refuse" in text


def deferred(matrix, ratio, mode, match="not wired up", raises="ValueError"):
    """The probe of a cell that would say that its step is not wired up."""
    cell = matrix.cell(f"r{ratio}/{mode}")
    probe = Probe(OWN_STEP, raises, match)
    cell = replace(cell, state=State.DEFERRED, variants=(), reason="Not wired up yet.", probe=probe)
    return Case(f"r{ratio}-{mode}-refused", "probe", cell=cell, probe=probe, reason=cell.reason)


def test_a_cell_that_works_cannot_be_called_deferred(toy, matrix):
    works = [cell for cell in matrix.cells if cell.variants and cell.id != "r0/eager"]
    assert len(works) > 10
    for cell in works:
        text = failure(deferred(matrix, cell.ratio, cell.mode), matrix, toy.ToyBackend)
        assert "went through; a refusal was due" in text
        assert f"promote it. Set `state: covered` for {cell.id}" in text


@pytest.mark.parametrize("mode", ["de-eager", "de-cg", "eagle-draft-runner", "eagle-de-runner"])
def test_a_deferred_cell_whose_own_step_is_refused_passes(toy, matrix, mode):
    run_probe(deferred(matrix, 4, mode, match="SWA-only"), matrix, toy.ToyBackend, "cpu")


def test_every_way_of_an_own_step_must_refuse(toy, matrix):
    """Decode refuses, and so does the dense path of an extend; the sparse one goes through."""

    class Half(toy.ToyBackend):
        def forward(self, q, batch, compress_ratio, attn_sink):
            if compress_ratio == 4 and (batch.forward_mode == "decode" or self.runner.prefill_path == "dense"):
                raise ValueError("ratio 4 is not wired up")
            return super().forward(q, batch, compress_ratio, attn_sink)

    text = failure(deferred(matrix, 4, "eager"), matrix, Half)
    assert "the eager extend step, sparse path went through" in text


def test_an_own_step_may_write_in_the_calls_before_the_one_that_refuses(toy, matrix):
    class Late(toy.ToyBackend):
        def forward(self, q, batch, compress_ratio, attn_sink):
            if compress_ratio == 4:
                raise ValueError("ratio 4 is not wired up")
            return super().forward(q, batch, compress_ratio, attn_sink)

    class Writing(Late):
        def forward(self, q, batch, compress_ratio, attn_sink):
            if compress_ratio == 4:
                self.pools["swa"][1, 0] ^= 1
            return super().forward(q, batch, compress_ratio, attn_sink)

    for mode in ("eager", "verify-cg"):
        run_probe(deferred(matrix, 4, mode), matrix, Late, "cpu")
        assert "1 cache bytes had changed" in failure(deferred(matrix, 4, mode), matrix, Writing)


def test_a_refusal_that_only_a_capture_meets_counts(toy, matrix):
    class Uncaptured(toy.ToyBackend):
        warm = False

        def on_after_cuda_graph_warmup(self):
            self.warm = True

        def init_forward_metadata_in_graph(self, batch):
            if self.warm:
                raise ValueError("a captured verify is not wired up")
            super().init_forward_metadata_in_graph(batch)

    run_probe(deferred(matrix, 0, "verify-cg"), matrix, Uncaptured, "cpu")


def test_an_own_step_that_breaks_is_no_refusal(toy, matrix):
    assert "raised another type" in failure(deferred(matrix, 4, "cg-decode"), matrix, toy.broken("raises"))


def test_a_refusal_outside_the_cells_names_its_entry(toy, matrix):
    case = next(case for case in probes(matrix) if case.id == "refusal-page-size")
    text = failure(case, matrix, toy.broken("refuses_nothing"))
    assert "refusals: page-size" in text
    assert "remove the entry from `refusals`" in text


def test_a_case_without_a_probe_or_with_an_unknown_site_is_an_error(toy, matrix):
    covered = next(case for case in matrix.cases() if case.kind == "case")
    with pytest.raises(ValueError, match="has no probe"):
        run_probe(covered, matrix, toy.ToyBackend, "cpu")
    unknown = Case("refusal-x", "refusal", probe=Probe("nowhere", "ValueError", "x"))
    with pytest.raises(ValueError, match="no such probe site 'nowhere'"):
        run_probe(unknown, matrix, toy.ToyBackend, "cpu")
