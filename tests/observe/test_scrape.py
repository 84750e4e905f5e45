"""A live scrape of the shipped pair: what is documented is there, what is there is documented, and
the numbers are those that the clients counted."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fakes import ScriptedDrafter, eventually, generate, tiny_target
from observe.kit import Labels, fetch, scrape, total
from observe.pair_kit import Load, metered, metered_drafter, metered_verifier

from draftwire.config import ConfigError, validate
from draftwire.exporter import Exporter
from draftwire.meters import Reading
from draftwire.metric_table import PROCESS, of_service
from draftwire.rpc_meter import method_label
from draftwire.runtime import run
from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_kernels.tree import TokenTree
from verifier_service.config import VerifierConfig
from verifier_service.metrics import Meter
from verifier_service.service import VerifierService


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_target(tmp_path_factory.mktemp("target"))


def differences(service: str, found: dict[str, dict[Labels, float]]) -> list[str]:
    """What is documented and not there, or there and not as documented."""
    wrong, seen = [], set()
    for metric in of_service(service):
        names = {
            "histogram": [f"{metric.name}_{part}" for part in ("bucket", "sum", "count")],
        }.get(metric.kind, [metric.name])
        seen.update(names)
        for name in names:
            series = found.get(name, {})
            if not series and not metric.gpu:
                wrong.append(f"{name} is missing")
            for labels in series:
                own = {key: value for key, value in labels if key != "le"}
                if set(own) != set(metric.label_names):
                    wrong.append(f"{name}{labels}")
                wrong += [
                    f"{name}: {key}={value}"
                    for key, value in own.items()
                    if value not in metric.allowed(key)
                ]
    return wrong + [f"{name} is not documented" for name in found.keys() - seen]


def test_documented_metrics_are_there_and_count_what_the_clients_counted(target: Path) -> None:
    async def main() -> None:
        async with (
            metered_drafter(target) as (_, address, drafter_url),
            metered_verifier(target, address, draft_wait_ms=10_000.0) as (service, stub, url),
        ):
            load = Load()
            while not load.sum("accepted_tokens"):  # a busy machine may make drafts late
                await asyncio.gather(*(load.one(stub, number) for number in range(12)))
            await load.refuse(stub)
            call = stub.Generate(_endless())
            await call.read()
            call.cancel()
            await eventually(lambda: not service.engine.sessions)
            await eventually(lambda: not service.servicer._queues)
            await asyncio.sleep(0)
            v, d = [await asyncio.to_thread(scrape, u) for u in (url, drafter_url)]

            assert differences("verifier", v) == []
            assert differences("drafter", d) == []
            _check_speculation(load, v)
            _check_requests(load, v)
            _check_steps(v)
            _check_drafter(v, d)

    asyncio.run(main())


def _endless() -> Any:
    return verifier_pb2.GenerateRequest(
        text="again",
        stop=types_pb2.StopConditions(max_tokens=400, ignore_eos=True),
        speculation=types_pb2.SpeculationOptions(mode=types_pb2.SPECULATION_MODE_OFF),
    )


def _check_speculation(load: Load, v: dict[str, dict[Labels, float]]) -> None:
    spec = "draftwire_spec_decode_"
    assert total(v, f"{spec}num_drafts_total") == load.sum("rounds") > 0
    assert total(v, f"{spec}num_draft_tokens_total") == load.sum("drafted_tokens")
    accepted = load.sum("accepted_tokens")
    assert total(v, f"{spec}num_accepted_tokens_total") == accepted > 0
    assert total(v, f"{spec}num_accepted_tokens_per_pos_total") == accepted
    assert total(v, f"{spec}accepted_by_request_total") == accepted
    assert total(v, f"{spec}accepted_tokens_by_part_total") == accepted
    assert total(v, f"{spec}drafts_by_request_total") == load.sum("rounds")
    assert total(v, f"{spec}num_discarded_tokens_total") == load.sum("discarded_tokens")
    for position in ("0", "1"):
        for name, field in (("accepted", "accepted"), ("drafted", "drafted")):
            tokens = "_tokens" if name == "accepted" else ""
            counted = sum(
                [*getattr(a.finished.acceptance, f"{field}_per_position"), 0, 0][int(position)]
                for a in load.answers
            )
            assert total(v, f"{spec}num_{name}{tokens}_per_pos_total", position=position) == counted
    for label, temperature in (("0", 0.0), ("to_0.5", 0.4), ("to_1", 1.0), ("above_1", 1.3)):
        rounds = sum(
            a.finished.acceptance.rounds
            for a in load.answers
            if abs(a.started.sampling.temperature - temperature) < 1e-6
        )
        assert total(v, f"{spec}drafts_by_request_total", temperature=label) == rounds
    sizes = [size for a in load.answers for size in a.finished.acceptance.block_sizes]
    plain = sum(s.rounds for s in sizes if s.block_size == 1)
    plain_by_wish = sum(s.rounds for s in sizes if s.reason == types_pb2.BLOCK_SIZE_REASON_OFF)
    # The request that was cancelled did not speculate either.
    assert total(v, "draftwire_verifier_block_size_count", reason="off") >= plain_by_wish > 0
    assert total(v, "draftwire_verifier_fallback_rounds_total") == plain - plain_by_wish


def _check_requests(load: Load, v: dict[str, dict[Labels, float]]) -> None:
    name = "draftwire_verifier_"
    assert total(v, f"{name}requests_total", outcome="max_tokens") == len(load.answers)
    assert total(v, f"{name}requests_total", outcome="cancelled") == 1
    assert total(v, f"{name}requests_refused_total", reason="invalid_field") == load.refused
    assert total(v, f"{name}requests_total") == len(load.answers) + 1
    prompts = sum(a.started.prompt_tokens for a in load.answers)
    assert total(v, f"{name}prompt_tokens_total") == prompts + len("again")
    for histogram in ("queue_seconds", "time_per_token_seconds"):
        assert total(v, f"{name}{histogram}_count") == len(load.answers)
    assert total(v, f"{name}request_seconds_count") == len(load.answers) + 1
    assert total(v, f"{name}requests_running") == total(v, f"{name}requests_waiting") == 0
    cached = sum(a.finished.usage.cached_tokens for a in load.answers)
    assert total(v, f"{name}cached_prompt_tokens_total") == cached
    handled = "draftwire_rpc_handled_total"
    generated = {"method": "Verifier/Generate"}
    assert total(v, handled, code="OK", **generated) == len(load.answers)
    assert total(v, handled, code="INVALID_ARGUMENT", **generated) == load.refused
    assert total(v, handled, code="CANCELLED", **generated) == 1
    started = total(v, "draftwire_rpc_started_total", **generated)
    assert started == len(load.answers) + load.refused + 1
    assert total(v, "draftwire_rpc_open", **generated) == 0
    assert total(v, "draftwire_rpc_seconds_count", **generated) == started


def _check_steps(v: dict[str, dict[Labels, float]]) -> None:
    name = "draftwire_verifier_"
    steps = total(v, f"{name}steps_total")
    # Warming up made one step or more before the first scrape could be.
    assert total(v, f"{name}step_rows_count") == total(v, f"{name}step_sessions_count") == steps
    for phase in ("plan", "target", "acceptance", "commit"):
        assert total(v, f"{name}round_seconds_count", phase=phase) == steps
    assert total(v, f"{name}round_seconds_count", phase="stream") > 0
    assert total(v, f"{name}round_seconds_sum", phase="target") > 0
    assert total(v, f"{name}moving") == 1
    assert total(v, f"{name}kv_pages", state="used") == 0


def _check_drafter(v: dict[str, dict[Labels, float]], d: dict[str, dict[Labels, float]]) -> None:
    assert total(v, "draftwire_verifier_lanes", state="ready") == 1
    assert total(v, "draftwire_verifier_drafters_configured") == 1
    assert total(d, "draftwire_drafter_lanes") == 1
    proposals = total(d, "draftwire_drafter_proposals_total")
    assert proposals >= total(v, "draftwire_spec_decode_num_drafts_total")
    assert total(d, "draftwire_drafter_block_size_count") == proposals
    # What one end sent, the other has taken.
    sent = total(v, "draftwire_carrier_bytes_total")
    assert sent == total(d, "draftwire_carrier_bytes_total") > 0
    assert total(d, "draftwire_drafter_sessions") == 0
    assert total(d, "draftwire_drafter_sessions_opened_total") > 0
    assert total(d, "draftwire_rpc_open", method="Drafter/Draft") == 1
    assert total(d, "draftwire_drafter_step_seconds_count", stage="draft") == total(
        d, "draftwire_drafter_steps_total"
    )


def test_process_metrics_are_of_this_process(target: Path) -> None:
    async def main() -> None:
        async with metered_verifier(target) as (_, _, url):
            found = await asyncio.to_thread(scrape, url)
            for metric in PROCESS:
                assert total(found, metric.name) > 0

    asyncio.run(main())


def test_a_hung_engine_is_shown_as_it_was_last_seen(target: Path) -> None:
    async def main() -> None:
        async with metered_verifier(target, stall_s=0.2) as (service, stub, url):
            await generate(stub, "hello", stop={"max_tokens": 4, "ignore_eos": True})
            before = await asyncio.to_thread(scrape, url)
            release = asyncio.Event()
            loop = asyncio.get_running_loop()
            inner = service.engine.host.step

            def stuck(*arguments: Any) -> Any:
                asyncio.run_coroutine_threadsafe(release.wait(), loop).result()
                return inner(*arguments)

            service.engine.host.step = stuck
            answer = asyncio.create_task(
                generate(stub, "hello", stop={"max_tokens": 4, "ignore_eos": True})
            )
            try:
                await eventually(lambda: not service.progress())
                found = await asyncio.to_thread(scrape, url)
                assert total(found, "draftwire_verifier_moving") == 0
                assert total(found, "draftwire_verifier_seconds_since_step") >= 0.2
                steps = "draftwire_verifier_steps_total"
                assert found[steps] == before[steps]
                sizes = "draftwire_verifier_block_size_count"
                assert found[sizes] == before[sizes]
            finally:
                release.set()
            assert len((await answer).tokens) == 4

    asyncio.run(main())


def test_a_port_that_is_taken_ends_the_service_with_a_clear_error(target: Path, capsys) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        arguments = ["--model", str(target), "--listen", "127.0.0.1:0", "--metrics-listen", address]
        assert run(VerifierService, VerifierConfig, "draftwire-verifier", arguments) == 2
        assert f"--metrics-listen: '{address}' is refused" in capsys.readouterr().err


def test_the_port_is_free_again_after_the_service_has_ended() -> None:
    exporter = Exporter("verifier", [])
    url = exporter.open("127.0.0.1:0")
    address = url.removeprefix("http://").removesuffix("/metrics")
    with pytest.raises(ConfigError):
        Exporter("drafter", []).open(address)
    exporter.close()
    with Exporter("drafter", []) as again:
        again.open(address)
        assert "draftwire_drafter_steps_total" in fetch(url)


def test_an_address_that_is_none_is_refused_before_anything_is_loaded() -> None:
    for address in ("9464", "host:99999", "unix:/tmp/x"):
        with pytest.raises(ConfigError, match="metrics-listen"):
            validate(VerifierConfig(metrics_listen=address))


def test_a_source_that_breaks_costs_the_scrape_and_not_the_service() -> None:
    broken = True

    def source() -> list[Reading]:
        if broken:
            raise RuntimeError("not now")
        return [Reading("draftwire_serving", 1)]

    with Exporter("verifier", [source]) as exporter:
        url = exporter.open("127.0.0.1:0")
        with pytest.raises(OSError, match=r"500|closed"):
            fetch(url)
        broken = False
        assert "draftwire_serving 1.0" in fetch(url)


def test_without_the_setting_nothing_is_counted_for_scrapes(target: Path) -> None:
    class Shell:
        service_names = ("draftwire.v1.Drafter",)

        def register(self, server: Any) -> None:
            assert server._server is not None

        async def start(self) -> None: ...

        def progress(self) -> bool:
            return True

        def readings(self) -> list[Reading]:
            raise AssertionError("nobody scrapes")

        async def drain(self) -> None: ...

        async def close(self) -> None: ...

    from fakes import running

    from draftwire.config import WireConfig

    async def main() -> None:
        async with running(Shell(), WireConfig(drain_grace_s=0.1, log_level="error")):
            pass

    asyncio.run(main())


def test_calls_are_counted_under_methods_that_are_known() -> None:
    assert method_label("/draftwire.v1.Verifier/Generate") == "Verifier/Generate"
    assert method_label("/grpc.health.v1.Health/Watch") == "Health/Watch"
    for unknown in ("/evil.Verifier/Drop", "/x", "", "/draftwire.v1.Verifier/Generate2"):
        assert method_label(unknown) == "other"


def test_calls_of_methods_that_do_not_exist_are_counted(target: Path) -> None:
    import grpc

    from draftwire.channel import open_channel

    async def main() -> None:
        service = VerifierService(
            config := VerifierConfig(
                listen="127.0.0.1:0",
                model=str(target),
                dtype="float32",
                metrics_listen="127.0.0.1:0",
                log_level="error",
                drain_grace_s=0.2,
            )
        )
        async with metered(service, config) as (address, url), open_channel(address) as channel:
            for number in range(3):
                call = channel.unary_unary(f"/draftwire.v1.Verifier/Nothing{number}")
                with pytest.raises(grpc.RpcError):
                    await call(b"")
            found = await asyncio.to_thread(scrape, url)
            handled = "draftwire_rpc_handled_total"
            assert total(found, handled, method="other", code="UNIMPLEMENTED") == 3

    asyncio.run(main())


def test_faults_of_a_drafter_are_counted_by_kind(target: Path) -> None:
    from fakes import scripted

    async def main() -> None:
        drafter = ScriptedDrafter(lambda tokens, session: TokenTree.chain((1, 2)))

        def malformed(response: Any) -> None:
            for proposal in response.proposals:
                proposal.tree.parents[0] = 5

        drafter.change_response = malformed
        async with (
            scripted(drafter) as address,
            metered_verifier(target, address) as (_, stub, url),
        ):
            answer = await generate(
                stub,
                "hello",
                stop={"max_tokens": 8, "ignore_eos": True},
                speculation={"mode": types_pb2.SPECULATION_MODE_FIXED},
            )
            found = await asyncio.to_thread(scrape, url)
            assert total(found, "draftwire_verifier_malformed_proposals_total") > 0
            assert total(found, "draftwire_spec_decode_num_drafts_total") == 0
            plain = sum(
                size.rounds
                for size in answer.finished.acceptance.block_sizes
                if size.reason != types_pb2.BLOCK_SIZE_REASON_OFF
            )
            assert total(found, "draftwire_verifier_fallback_rounds_total") == plain

    asyncio.run(main())


def test_the_engine_pays_little_for_being_counted() -> None:
    """Under 50 us a step of 64 sessions on a quiet machine; the bound here is ten times that, so
    that it holds on a busy one."""
    from types import SimpleNamespace

    from verifier_service.session import Proposal

    meter = Meter()
    sampling = SimpleNamespace(temperature=0.7)
    request = SimpleNamespace(sampling=sampling, watch=None)
    session: Any = SimpleNamespace(request=request, made=100, why_plain=9)
    proposal = Proposal(0, TokenTree.chain((1, 2, 3)), (), 4, 1)
    work: Any = [SimpleNamespace(feed=SimpleNamespace(tokens=[1, 2, 3]))] * 64

    def step() -> None:
        meter.mark()
        meter.begin(work)
        for phase in ("target", "acceptance", "commit"):
            meter.lap(phase)
        for _ in range(64):
            meter.round(session, proposal, (0, 1), 3)

    best = float("inf")
    for _ in range(50):
        begun = time.perf_counter()
        step()
        best = min(best, time.perf_counter() - begun)
    assert best < 500e-6
