"""The contract itself: it lints, and its stubs are what its files say."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftwire.v1 import drafter_pb2, types_pb2, verifier_pb2

ROOT = Path(__file__).resolve().parents[2]
FILES = (types_pb2, drafter_pb2, verifier_pb2)


def test_buf_finds_nothing_to_object_to():
    buf = shutil.which("buf", path=f"{Path(sys.executable).parent}")
    assert buf, "buf-bin of the dev extra is not installed"
    found = subprocess.run(
        [buf, "lint", "protos"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "", "")


def test_the_stubs_are_those_of_the_proto_files(tmp_path):
    pytest.importorskip("grpc_tools")
    sys.path.insert(0, str(ROOT))
    try:
        import hatch_build
    finally:
        sys.path.remove(str(ROOT))
    made = hatch_build.generate(tmp_path)
    assert {path.name for path in made} >= {"types_pb2.py", "drafter_pb2_grpc.py"}
    for path in made:
        current = ROOT / "protos" / path.relative_to(tmp_path)
        assert current.read_bytes() == path.read_bytes(), f"{path.name}: run `make protos`"


@pytest.mark.parametrize("module", FILES)
def test_enums_begin_with_unspecified(module):
    for enum in module.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")


def test_every_sampling_scalar_can_be_told_from_its_default():
    for message in (types_pb2.SamplingParams, types_pb2.StopConditions):
        for field in message.DESCRIPTOR.fields:
            assert field.has_presence or field.is_repeated, field.full_name
    # 0 is a temperature, and an unset one is not 0.
    assert not types_pb2.SamplingParams().HasField("temperature")
    sent = types_pb2.SamplingParams(temperature=0.0, seed=0).SerializeToString()
    back = types_pb2.SamplingParams.FromString(sent)
    assert back.HasField("temperature")
    assert back.HasField("seed")


def test_every_session_message_bears_the_session_key():
    for message in (
        drafter_pb2.OpenSession,
        drafter_pb2.Features,
        drafter_pb2.Outcome,
        drafter_pb2.EndSession,
        drafter_pb2.Proposal,
        drafter_pb2.SessionFault,
    ):
        assert message.DESCRIPTOR.fields_by_name["key"].message_type is (
            types_pb2.SessionKey.DESCRIPTOR
        )
