"""Puts the verifier together: model, engine thread, drafter pool, servicer.

Knows: what is made in which order, and taken down again. Does not know: how any of it works.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import secrets
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import structlog
import torch

from draftwire import gpu, tracing
from draftwire.channel import ChannelConfig
from draftwire.config import ConfigError, effective
from draftwire.meters import Reading
from draftwire.models import resolve, unpacked
from draftwire.v1 import drafter_pb2, types_pb2, verifier_pb2
from verifier_service import model as target
from verifier_service.admission import Limits
from verifier_service.cache import PagePool
from verifier_service.config import VerifierConfig
from verifier_service.drafters import DrafterPool
from verifier_service.engine import Engine, EngineLimits
from verifier_service.identity import eos_ids, model_identity
from verifier_service.info import ask, load
from verifier_service.metrics import Reader
from verifier_service.scheduler import Budgets
from verifier_service.servicer import SERVICE, VerifierServicer
from verifier_service.session import FinishReason
from verifier_service.warmup import profile, warm

PROTOCOL_MINOR = 1
_INFO_TIMEOUT = 2.0
_FIRST_DRAFTER_WAIT = 10.0
_FAREWELL = 1.0  # seconds of the grace kept for telling clients that the server goes away


class VerifierService:
    """Implements draftwire.runtime.Service."""

    service_names = (SERVICE,)

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config
        self.servicer = VerifierServicer(log_prompts=config.log_prompts)
        self.engine: Engine | None = None
        self._drafters: DrafterPool | None = None
        self._thread: threading.Thread | None = None
        self._traces: tracing.Tracing | None = None
        self._reader: Reader | None = None
        self._gpu: gpu.GpuMeter | None = None
        self._identity = types_pb2.ModelIdentity()
        self._instance = secrets.token_hex(8)
        self._counted = verifier_pb2.VerifierGetInfoResponse()  # when the engine was last heard
        self._ready_at = time.monotonic()
        self._log = structlog.get_logger("verifier")

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer; it answers UNAVAILABLE until `start` is done."""
        self.servicer.register(server)

    async def start(self) -> None:
        """Load, warm, start the engine's thread, look for drafters."""
        loop = asyncio.get_running_loop()
        self._traces = tracing.from_environment("draftwire-verifier", os.environ)
        tokenizer = await loop.run_in_executor(None, self._load)
        assert self.engine is not None
        engine, config = self.engine, self.config
        limits = self._limits(engine, tokenizer)
        self.servicer.open(engine, tokenizer, limits, self.describe, self._traces)
        self._thread = threading.Thread(target=engine.run, name="engine", daemon=True)
        self._thread.start()
        self._drafters = DrafterPool(
            config.drafters,
            self._drafter_channel(),
            engine,
            self._hello,
            use_rings=config.carrier == "auto",
            lanes=config.drafter_lanes,
        )
        self._reader = Reader(engine, self._drafters)
        self._gpu = gpu.meter_of(engine.host.device)
        await self._drafters.start(_FIRST_DRAFTER_WAIT)
        self._ready_at = time.monotonic()

    def _load(self) -> Any:
        """Everything that blocks: weights, certification of the arithmetic, pages, a warm step."""
        config = self.config
        if config.threads:
            torch.set_num_threads(config.threads)
        source = unpacked(resolve(config.model))
        dtype = (
            target.auto_dtype(config.device)
            if config.dtype == "auto"
            else getattr(torch, config.dtype)
        )
        tokenizer = target.load_tokenizer(source, revision=config.revision)
        model = target.load_model(source, dtype, config.device, revision=config.revision)
        host = target.TargetHost(
            model,
            invariant=config.numerics == "invariant",
            kernels=config.kernels,
            keep_weights=False,
        )
        pool = PagePool(config.kv_tokens // config.page_size + 1, config.page_size)
        max_context = self._max_context(host, pool)
        self.engine = Engine(
            host,
            tokenizer,
            pool,
            Budgets(
                config.max_sessions,
                config.max_step_rows,
                min(config.prefill_rows, host.most_session_rows),
                config.max_waiting,
            ),
            EngineLimits(config.draft_wait_ms / 1e3, config.lane_timeout_s, config.stall_s),
            vocab_size=min(len(tokenizer), host.embedding_rows),
            max_context=max_context,
            clock=time.monotonic,
            emit=self.servicer.emit,
        )
        self._identity = model_identity(
            config.served_name or source.name, host, tokenizer, max_context
        )
        warm(self.engine, config.max_nodes)
        if config.profile_s:
            profile(self.engine, config.profile_s)
        self._log.info(
            "target ready",
            model=self._identity.name,
            dtype=str(dtype).removeprefix("torch."),
            device=config.device,
            numerics=host.plan.describe(),
            kv_pages=pool.num_pages - 1,
            max_context=max_context,
            step_ms=round(1e3 * self.engine.step_time, 1),
        )
        return tokenizer

    def _max_context(self, host: target.TargetHost, pool: PagePool) -> int:
        """The longest context that always fits: one session with a full tree must be able to run
        alone."""
        fits = (pool.num_pages - 1) * pool.page_size - self.config.max_nodes - 1
        asked = self.config.max_context
        if asked > host.max_context:
            raise ConfigError("--max-context", asked, f"at most the model's {host.max_context}")
        if asked > fits:
            raise ConfigError("--max-context", asked, f"at most {fits}, which --kv-tokens leaves")
        if fits < 2:
            raise ConfigError(
                "--kv-tokens", self.config.kv_tokens, "larger: no context fits beside --max-nodes"
            )
        return asked or min(host.max_context, fits)

    def _limits(self, engine: Engine, tokenizer: Any) -> Limits:
        config = self.config
        return Limits(
            vocab_size=engine.vocab_size,
            max_context=engine.max_context,
            max_tokens=config.max_tokens,
            default_max_tokens=config.default_max_tokens,
            max_block_size=config.max_block_size,
            max_nodes=config.max_nodes,
            eos_ids=eos_ids(engine.host.model, tokenizer),
            mode=types_pb2.SpeculationMode.Value(f"SPECULATION_MODE_{config.speculation.upper()}"),
            longest_token=max(len(token.encode()) for token in tokenizer.get_vocab()),
        )

    def _drafter_channel(self) -> ChannelConfig:
        config = self.config
        token = (
            config.drafter_token_file.read_text().split()[0] if config.drafter_token_file else None
        )
        return ChannelConfig(
            tls_ca=config.drafter_ca,
            tls_cert=config.drafter_cert,
            tls_key=config.drafter_key,
            token=token,
            allow_insecure=config.allow_insecure,
            max_message_bytes=config.max_message_bytes,
            keepalive_s=config.keepalive_s,
            server_name_override=config.drafter_server_name,
        )

    def _hello(self) -> drafter_pb2.Hello:
        fused, raw = drafter_pb2.FEATURE_ENCODING_FUSED, drafter_pb2.FEATURE_ENCODING_RAW
        return drafter_pb2.Hello(
            version=self._version(),
            target=self._identity,
            verifier_name=self.config.name,
            encodings=[fused, raw] if self.config.features == "fused" else [raw],
            max_block_size=self.config.max_block_size,
            max_nodes=self.config.max_nodes,
            max_message_bytes=self.config.max_message_bytes,
            tensors_on_offer=self.engine.host.tensor_names() if self.engine else [],
        )

    def progress(self) -> bool:
        """Whether the engine moves when it has work."""
        return self.engine is None or self.engine.progress()

    async def drain(self) -> None:
        """Take no new request; return when the admitted ones are done. Near the end of the grace
        those left are ended with what they have made, while their streams are still open."""
        self.servicer.draining = True
        grace = self.config.drain_grace_s
        try:
            async with asyncio.timeout(grace - min(_FAREWELL, grace / 2)):
                await self.servicer.wait_idle()
        except TimeoutError:
            if (engine := self.engine) is not None:
                engine.post(lambda: engine.finish_all(FinishReason.FINISH_REASON_SHUTDOWN))
            await self.servicer.wait_idle()

    async def close(self) -> None:
        """End what is left with what it has made, then stop."""
        self.servicer.draining = True
        if self.engine is not None and self._thread is not None:
            engine = self.engine
            engine.post(lambda: engine.finish_all(FinishReason.FINISH_REASON_SHUTDOWN))
        if self._drafters is not None:
            await self._drafters.close()
        if self.engine is not None and self._thread is not None:
            self.engine.stop()
            await asyncio.get_running_loop().run_in_executor(None, self._thread.join, 10.0)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def readings(self) -> Iterator[Reading]:
        """Everything the metrics show; called from another thread at each scrape."""
        yield from self.servicer.meter.readings()
        if self._reader is not None:
            yield from self._reader.readings()
        if self._gpu is not None:
            yield from self._gpu.readings()

    # -- GetInfo

    def _version(self) -> types_pb2.ServiceVersion:
        version = types_pb2.ServiceVersion(
            package_version=_package_version(),
            protocol_minor=PROTOCOL_MINOR,
            instance_id=self._instance,
        )
        version.uptime.FromNanoseconds(int(1e9 * (time.monotonic() - self._ready_at)))
        return version

    async def describe(self) -> verifier_pb2.VerifierGetInfoResponse:
        """What the service is; a hung engine is described by what can be read without it."""
        assert self.engine is not None
        engine = self.engine
        config = effective(self.config) | {
            "effective_numerics": engine.host.plan.describe(),
            "effective_step_costs": engine.policy.costs.describe(),
        }
        response = verifier_pb2.VerifierGetInfoResponse(
            version=self._version(),
            model=self._identity,
            config=config,
            draining=self.servicer.draining,
        )
        if self._gpu is not None and (device := self._gpu.describe()) is not None:
            response.devices.append(device)
        response.load.CopyFrom(load(engine))
        statuses = list(self._drafters.status.values()) if self._drafters else []
        answer = ask(engine, statuses)
        try:
            self._counted = await asyncio.wait_for(asyncio.wrap_future(answer), _INFO_TIMEOUT)
        except TimeoutError:
            # In a long step the last counters are told: they never go back.
            self._log.warning("engine did not answer GetInfo in time")
        response.MergeFrom(self._counted)
        return response


def _package_version() -> str:
    try:
        return importlib.metadata.version("draftwire")
    except importlib.metadata.PackageNotFoundError:
        return "0+source"
