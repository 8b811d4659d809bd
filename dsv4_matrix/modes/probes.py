"""Probes: a cell that is not covered promises a refusal, and here the backend is asked to make it good."""

from __future__ import annotations

import builtins
import re

from dsv4_matrix.declaration.model import Case, Matrix, Probe, State
from dsv4_matrix.declaration.sites import OWN_STEP
from dsv4_matrix.import_fault import ENDINGS
from dsv4_matrix.modes.errors import BackendError
from dsv4_matrix.modes.own_step import OwnStep, own_steps
from dsv4_matrix.modes.rig import Rig
from dsv4_matrix.modes.sites import SITES, Site
from dsv4_matrix.modes.watch import CacheWatch
from dsv4_matrix.protocol import BackendFactory

__all__ = ["SITES", "ProbeFailed", "Site", "run_probe"]


class ProbeFailed(AssertionError):  # noqa: N818  (reads as the outcome)
    """The promised refusal did not happen. ``str()``: what happened, what the declaration says, what to edit.

    Not which case that is: the screen around it says so.
    """


def run_probe(case: Case, matrix: Matrix, factory: BackendFactory, device: str) -> None:
    """Bring the backend to the probe's call site and demand its refusal.

    The call must raise exactly the declared type with a matching message and change no cache byte; afterwards the
    backend (or, where the call builds one, a newly built one) must serve a small eager decode. A cell's own step is
    tried in every way in which its mode runs it.

    Raises:
        ProbeFailed: any of that is not so.
        ValueError: ``case`` has no probe, or its site has no implementation.
    """
    if case.probe is None:
        raise ValueError(f"{case.id}: a {case.kind} has no probe")
    says = _declaration(case, matrix, case.probe)
    for site in _sites(case, case.probe.site):
        _demand_refusal(case, case.probe, site, factory, device, says)


def _sites(case: Case, name: str) -> tuple[Site | OwnStep, ...]:
    if name == OWN_STEP and case.cell is not None:
        return own_steps(case.cell.mode)
    if name not in SITES:
        known = ", ".join((*SITES, OWN_STEP) if case.cell else SITES)
        raise ValueError(f"{case.id}: no such probe site {name!r}; known: {known}")
    return (SITES[name],)


def _demand_refusal(
    case: Case, probe: Probe, site: Site | OwnStep, factory: BackendFactory, device: str, says: str
) -> None:
    rig = Rig(factory, device, case.cell.ratio if case.cell else 0, site.prefill_path)
    try:
        arranged = site.arranged(rig)
        cache = CacheWatch(arranged.pools())
    except ENDINGS as error:
        raise ProbeFailed(
            f"the backend raised before it was brought to {site.call}.\n"
            f"{BackendError('the preparation of the call', error)}\n{says}\n"
            "Fix the backend: only the call itself may refuse."
        ) from error
    for call in arranged.calls:
        try:
            call()
        except ENDINGS as error:
            _check_refusal(probe, site, error, says)
            break
        cache = CacheWatch(arranged.pools())
    else:
        raise ProbeFailed(f"{site.call} went through; a refusal was due.\n{says}\n{_advice(case)}")
    if changed := cache.changed()[0]:
        raise ProbeFailed(
            f"{site.call} refused, but {changed} cache bytes had changed by then.\n{says}\n"
            "Fix the backend: refuse before anything is written."
        )
    _demand_service(rig, site, says)


def _check_refusal(probe: Probe, site: Site | OwnStep, error: BaseException, says: str) -> None:
    """ProbeFailed unless ``error`` is of the declared type, with a matching message."""
    found = f"{type(error).__name__}: {error}"
    if type(error) is not getattr(builtins, probe.raises):
        raise ProbeFailed(
            f"{site.call} raised another type.\ngot      {found}\n{says}\n"
            f"{BackendError(site.call, error)}\n"
            f"If the new type is right, edit `raises` of the probe; otherwise raise {probe.raises} in the backend."
        ) from error
    if not re.search(probe.match, str(error)):
        raise ProbeFailed(
            f"{site.call} raised {probe.raises} with another message.\ngot      {found}\n{says}\n"
            "If it refuses for the declared reason, name that in the message, or edit `match` of the probe where "
            "the declaration is yours; if not, the reason no longer holds."
        ) from error


def _demand_service(rig: Rig, site: Site | OwnStep, says: str) -> None:
    try:
        wrong = rig.serve(rig.backend)
    except ENDINGS as error:
        wrong = str(BackendError("a small eager decode", error))
    if wrong:
        raise ProbeFailed(
            f"{site.call} refused, but afterwards an eager decode gave: {wrong}\n{says}\n"
            "Fix the backend: a refusal must leave it usable. Begin with the eager cases, if they fail alike."
        )


def _declaration(case: Case, matrix: Matrix, probe: Probe) -> str:
    """What the declaration says, and where."""
    if case.cell is None:
        where, state = f"{matrix.path}, refusals: {case.id.removeprefix('refusal-')}", "refused"
    else:
        where, state = str(case.cell.place or matrix.path), f"{case.cell.id} is {case.cell.state}"
    return f"declared {state}: {case.reason} ({where})\nexpected {probe.raises} matching {probe.match!r}"


def _advice(case: Case) -> str:
    if case.cell is not None and case.cell.state is State.DEFERRED:
        return (
            f"The cell works now: promote it. Set `state: covered` for {case.cell.id}, remove `reason` and `probe`, "
            "and declare `variants`."
        )
    if case.cell is not None:
        return (
            f"Either the backend lost its guard: restore it; or {case.cell.id} is possible now: set its state to "
            "`covered` with `variants`, or to `deferred`."
        )
    return "Either the backend lost its guard: restore it; or the limit is gone: remove the entry from `refusals`."
