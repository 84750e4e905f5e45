"""The verifier's settings: what no single one shows."""

from __future__ import annotations

import pytest

from draftwire.config import ConfigError, validate
from verifier_service.config import VerifierConfig


@pytest.mark.parametrize(
    "target", ["a b", "host", "host:99999", "dns:///host", "dns://1.1.1.1/host:1", "a:1,b c", ""]
)
def test_a_drafter_that_could_never_be_reached_is_refused_at_the_start(target: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(VerifierConfig(drafters=("127.0.0.1:1", target)))
    assert (caught.value.field, caught.value.value) == ("--drafters", target)


@pytest.mark.parametrize(
    "target", ["host:1", "[::1]:1", "dns:///host:1", "dns:host:1", "unix:/tmp/x.sock", "a:1,b:2"]
)
def test_every_written_form_of_a_drafter_is_taken(target: str) -> None:
    validate(VerifierConfig(drafters=(target,)))
