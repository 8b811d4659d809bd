"""The environment's rules: who wins, what travels, what is too late, what two runs must agree in."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from dsv4_matrix.environment import (
    NCCL,
    SGLANG,
    SUITE,
    Attestation,
    Before,
    ConflictError,
    EnvironmentValueError,
    EnvVar,
    Mode,
    Profile,
    TooLateError,
    apply,
    apply_in_process,
    attest,
    disagreements,
    forward,
    prepare,
)
from dsv4_matrix.environment.launch import RECORD
from dsv4_matrix.environment.profiles import phantoms


def variable(name="SAFE", value="1", mode=Mode.FORCE, before=Before.CALL, **more):
    return EnvVar(name, value, mode, before, "a test", **more)


FORCED = Profile("forced", (variable(),))
OPT_OUT = Profile("opt-out", (variable("FUSED_OFF", mode=Mode.DEFAULT, pattern="[01]"),))


def setting(applied, name):
    return next(setting for setting in applied.settings if setting.name == name)


@pytest.mark.parametrize("environ", [{}, {"SAFE": ""}, {"SAFE": "1"}])
@pytest.mark.parametrize("strict", [False, True])
def test_forced_where_the_user_says_nothing_else(environ, strict):
    before = dict(environ)
    applied = apply([FORCED], environ, strict=strict)
    assert environ == before
    assert applied.environ["SAFE"] == "1"
    assert setting(applied, "SAFE").replaced == ()


def test_forced_over_the_user_is_recorded_and_in_the_gate_refused():
    applied = apply([FORCED], {"SAFE": "0", "OTHER": "x"})
    assert applied.environ == {"SAFE": "1", "OTHER": "x"}
    assert setting(applied, "SAFE").replaced == ("0 of the user",)
    with pytest.raises(ConflictError, match=r"SAFE is set to '0' but profile forced needs '1'"):
        apply([FORCED], {"SAFE": "0"}, strict=True)


def test_default_keeps_the_user_and_marks_the_run():
    assert apply([OPT_OUT], {}).environ["FUSED_OFF"] == "1"
    kept = apply([OPT_OUT], {"FUSED_OFF": "0"}, strict=True)
    assert kept.environ["FUSED_OFF"] == "0"
    assert setting(kept, "FUSED_OFF").profile == "the user"
    assert "FUSED_OFF=0" in kept.not_deterministic[0]
    assert apply([OPT_OUT], {"FUSED_OFF": "1"}).not_deterministic == ()


@pytest.mark.parametrize("value", ["", "yes", "2"])
def test_default_with_a_value_that_would_be_misread(value):
    with pytest.raises(EnvironmentValueError, match="FUSED_OFF"):
        apply([OPT_OUT], {"FUSED_OFF": value})


def test_later_profile_wins_and_the_record_says_over_whom():
    ring = Profile("ring", (variable("NCCL_ALGO", "Ring"),))
    tree = Profile("tree", (variable("NCCL_ALGO", "Tree"),))
    applied = apply([tree, ring], {"NCCL_ALGO": "CollNet"})
    assert setting(applied, "NCCL_ALGO").profile == "ring"
    assert setting(applied, "NCCL_ALGO").value == "Ring"
    assert setting(applied, "NCCL_ALGO").replaced == ("Tree of profile tree", "CollNet of the user")
    assert apply([ring, tree], {}).environ["NCCL_ALGO"] == "Tree"


@pytest.mark.parametrize(
    ("profile", "name", "value"),
    [
        (NCCL, "NCCL_ALGO", "Tree"),
        (SGLANG, "SGLANG_BATCH_INVARIANT_OPS_ENABLE_MM_FALLBACK_VARIANT", "1"),
        (SUITE, "CUBLAS_WORKSPACE_CONFIG", ":4096:8"),
    ],
)
def test_the_gate_refuses(profile, name, value):
    with pytest.raises(ConflictError, match=name):
        apply([SUITE, profile] if profile is not SUITE else [SUITE], {name: value}, strict=True)


def test_forwarding_drops_unset_and_empty_and_keeps_zero():
    profile = Profile("p", tuple(variable(name) for name in ("UNSET", "EMPTY", "ZERO", "ONE")))
    assert forward([profile], {"EMPTY": "", "ZERO": "0", "ONE": "1", "FOREIGN": "1"}) == {"ZERO": "0", "ONE": "1"}
    always = Profile("p", (variable("SEED", "7", always_forward=True),))
    assert forward([always], {}) == {"SEED": "7"}
    assert forward([always], {"SEED": ""}) == {"SEED": "7"}
    assert forward([always], {"SEED": "9"}) == {"SEED": "9"}


def test_an_empty_value_that_travels_breaks_its_reader():
    reader = [sys.executable, "-c", "import os; int(os.environ.get('ZERO', '0'))"]
    parent = {"ZERO": ""}
    assert subprocess.run(reader, env={**os.environ, **parent}, capture_output=True, check=False).returncode == 1
    given = forward([Profile("p", (variable("ZERO", "0"),))], parent)
    environ = {key: value for key, value in os.environ.items() if key != "ZERO"}
    assert subprocess.run(reader, env={**environ, **given}, capture_output=True, check=False).returncode == 0


def hashes(launched):
    command = subprocess.run(launched.argv, env=dict(launched.environ), capture_output=True, text=True, check=True)
    return command.stdout


def test_a_prepared_child_has_the_hash_seed_and_the_record():
    program = ["-c", f"import os; print(hash('dsv4'), os.environ['{RECORD}'])"]
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONHASHSEED"}
    first = hashes(prepare(program, [SUITE], environ))
    assert first == hashes(prepare(program, [SUITE], environ))
    other = hashes(prepare(program, [SUITE.replacing(PYTHONHASHSEED="1")], environ))
    assert first.split()[0] != other.split()[0]


def test_setting_the_hash_seed_in_process_changes_only_children():
    program = (
        "import os, subprocess, sys; before = hash('dsv4'); os.environ['PYTHONHASHSEED'] = '123';"
        "child = subprocess.run([sys.executable, '-c', 'print(hash(\"dsv4\"))'], capture_output=True, text=True);"
        "print(before == hash('dsv4'), before == int(child.stdout))"
    )
    environ = {**os.environ, "PYTHONHASHSEED": "5"}
    told = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=True)
    assert told.stdout.split() == ["True", "False"]


@pytest.mark.parametrize("before", [Before.CUDA, Before.NCCL, Before.IMPORT])
def test_too_late_once_torch_is_imported(before):
    profile = Profile("p", (variable("LATE", before=before),))
    environ = {}
    with pytest.raises(TooLateError, match=r"LATE=1 .*before torch|LATE=1 .*before the module"):
        apply_in_process([profile], environ, loaded={"torch"})
    assert environ == {}
    apply_in_process([profile], environ, loaded=())
    assert environ == {"LATE": "1"}
    apply_in_process([profile], environ, loaded={"torch"})  # it is as it should be


def test_interpreter_variables_are_always_too_late_and_calls_never():
    with pytest.raises(TooLateError, match="PYTHONHASHSEED"):
        apply_in_process([SUITE], {}, loaded=())
    environ = {}
    apply_in_process([FORCED], environ, loaded={"torch"})
    assert environ == {"SAFE": "1"}


def libraries(pattern):
    """Files of an installed NVIDIA wheel or the system that match."""
    roots = [Path(place) for place in (find_spec("nvidia").submodule_search_locations if find_spec("nvidia") else ())]
    roots += [Path("/usr/lib/x86_64-linux-gnu"), Path("/usr/local/lib")]
    return sorted(path for root in roots if root.is_dir() for path in root.rglob(pattern))


def test_phantom_names(tmp_path):
    library = tmp_path / "libnccl.so.2"
    library.write_bytes(b"\0".join([b"", *(v.name.encode() for v in NCCL.variables), b"NCCL_ALGORITHM", b""]))
    assert phantoms(NCCL.variables, library) == ()
    invented = (*NCCL.variables, variable("NCCL_DETERMINISTIC"), variable("NCCL_P2P_NET_DISABLE"))
    assert phantoms(invented, library) == ("NCCL_DETERMINISTIC", "NCCL_P2P_NET_DISABLE")
    library.write_bytes(b"\0NCCL_ALGORITHM\0")
    assert "NCCL_ALGO" in phantoms(NCCL.variables, library)


def test_nccl_reads_every_name_of_its_profile():
    found = libraries("libnccl.so*")
    if not found:
        pytest.skip("libnccl is not installed here, so its names cannot be looked up")
    for library in found:
        assert phantoms(NCCL.variables, library) == ()
        assert phantoms([variable("NCCL_DETERMINISTIC")], library) == ("NCCL_DETERMINISTIC",)


def test_every_variable_names_its_reader():
    for profile in (SUITE, NCCL, SGLANG):
        for each in profile.variables:
            assert each.reader
    for name, reader in (("lower", "x"), ("A B", "x"), ("FINE", "")):
        with pytest.raises(ValueError, match="EnvVar"):
            EnvVar(name, "1", Mode.FORCE, Before.CALL, reader)
    with pytest.raises(ValueError, match="does not match"):
        variable(value="", pattern="[01]")
    with pytest.raises(ValueError, match="twice"):
        Profile("p", (variable(), variable()))
    with pytest.raises(KeyError, match="NOT_THERE"):
        SUITE.replacing(NOT_THERE="1")


def attested(environ, **more):
    return attest([SUITE], environ, modules={}, **more)


def prepared(environ=None, **values):
    return dict(prepare([], [SUITE.replacing(**values)], environ or {}).environ)


def test_attestations_of_like_runs_agree_whatever_the_hash_seed():
    first, second = attested(prepared()), attested(prepared(PYTHONHASHSEED="1"))
    assert first.faults == ()
    assert first.sha256() == second.sha256()
    assert dict(first.may_differ)["PYTHONHASHSEED"] != dict(second.may_differ)["PYTHONHASHSEED"]
    assert disagreements(first, second) == ()
    assert Attestation.from_json(first.to_json()) == first


def test_unlike_runs_are_refused_with_the_reason():
    first = attested(prepared())
    other = attested({**prepared(), "TRITON_INTERPRET": "1"})
    assert first.sha256() != other.sha256()
    assert disagreements(first, other) == ("TRITON_INTERPRET is (unset) in one run and 1 in the other",)


def test_drift_opt_outs_and_early_imports_are_faults():
    changed = attested({**prepared(), "CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert any("CUBLAS_WORKSPACE_CONFIG was set to :16:8" in fault for fault in changed.faults)
    opted = attested(prepared({"DSV4_INVARIANT_LOGPROBS": "0"}))
    assert any("not deterministic: DSV4_INVARIANT_LOGPROBS=0" in fault for fault in opted.faults)
    assert any("torch was imported" in fault for fault in attested(prepared(), early=["torch"]).faults)
    assert any("not prepared" in fault for fault in attested({}).faults)
    assert disagreements(opted, opted) == opted.faults


def fake_torch(version="2.13", tf32=False, device=None, threads=1, hip=None):
    def properties(_):
        return SimpleNamespace(name=device, major=9, minor=0, multi_processor_count=132)

    matmul = SimpleNamespace(allow_tf32=tf32)
    cudnn = SimpleNamespace(allow_tf32=tf32, benchmark=False, deterministic=True)
    cuda = SimpleNamespace(
        is_available=lambda: device is not None, get_device_properties=properties, current_device=lambda: 0
    )
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda="13.0", hip=hip),
        backends=SimpleNamespace(cuda=SimpleNamespace(matmul=matmul), cudnn=cudnn),
        are_deterministic_algorithms_enabled=lambda: True,
        cuda=cuda,
        get_num_threads=lambda: threads,
    )


def fake_driver(status):
    class Library:
        def __init__(self, name):
            assert name == "libcuda.so.1"

        def cuDriverGetVersion(self, into):  # noqa: N802  (the driver's own name)
            into._obj.value = 13000
            return status

    return Library


@pytest.mark.parametrize("other", [{"version": "2.14"}, {"tf32": True}, {"threads": 2}, {"device": "H200"}])
def test_versions_switches_and_devices_must_match(monkeypatch, other):
    monkeypatch.setattr(ctypes, "CDLL", fake_driver(0))
    left, right = (attest([SUITE], prepared(), modules={"torch": fake_torch(**more)}) for more in ({}, other))
    assert disagreements(left, right)
    assert left.sha256() != right.sha256()


def test_real_torch_can_be_attested():
    import torch

    facts = dict(attest([SUITE], prepared(), modules={"torch": torch}).must_match)
    assert facts["torch"] == torch.__version__
    assert "device" in facts


def test_it_needs_no_torch():
    program = "import sys, dsv4_matrix.environment; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("text", ["[]", "{}", '{"must_match":[]}'])
def test_a_broken_attestation_is_refused(text):
    with pytest.raises(ValueError, match="attestation"):
        Attestation.from_json(text)


def on_gpu(**more):
    return attest([SUITE], prepared(), modules={"torch": fake_torch(device="NVIDIA H200", **more)})


def test_the_driver_is_asked_itself(monkeypatch, tmp_path):
    """torch's own way to the driver's version moved between releases, and a GPU's attestation went with it."""
    monkeypatch.setattr(ctypes, "CDLL", fake_driver(0))
    release = tmp_path / "version"
    monkeypatch.setattr(sys.modules[attest.__module__], "_MODULE", release)
    assert dict(on_gpu().must_match)["driver"] == "CUDA 13000"
    release.write_text("580.65.06\n")
    assert dict(on_gpu().must_match)["driver"] == "580.65.06, CUDA 13000"
    assert dict(on_gpu(hip="7.0").must_match)["driver"] == "ROCm 7.0"
    assert on_gpu().faults == ()


def test_a_driver_that_does_not_answer_is_a_fault(monkeypatch):
    """Otherwise runs under two drivers would be compared; and a worker must not die of it."""
    monkeypatch.setattr(ctypes, "CDLL", fake_driver(100))
    assert on_gpu().faults == ("the GPU's driver cannot be told: cuDriverGetVersion: CUDA error 100",)

    def absent(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert on_gpu().faults == ("the GPU's driver cannot be told: libcuda.so.1: cannot open shared object file",)


def test_what_chooses_kernels_must_match_and_where_they_lie_need_not():
    plain = attest([SUITE], prepared(), modules={})
    for name in ("DSV4_TRITON_KERNEL", "TRITON_F32_DEFAULT"):
        other = attest([SUITE], {**prepared(), name: "hopper"}, modules={})
        assert any(name in told for told in disagreements(plain, other))
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "DSV4_MATRIX_GATE_RUN", "PYTHONPYCACHEPREFIX"):
        other = attest([SUITE], {**prepared(), name: "/elsewhere"}, modules={})
        assert not disagreements(plain, other)
