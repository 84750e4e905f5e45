"""The drafter's life: load, warm, serve, drain, free.

Knows how configuration becomes an engine and a servicer. Does not know signals, ports or health.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc.aio
import structlog
import torch

from drafter_service import checkpoint as checkpoints
from drafter_service import predictor as predictors
from drafter_service import target as targets
from drafter_service.checkpoint import Checkpoint
from drafter_service.config import Config
from drafter_service.draft_config import CheckpointError, parse
from drafter_service.engine import Engine, EngineSettings
from drafter_service.handshake import Facts, TargetInPlace
from drafter_service.metrics import readings
from drafter_service.model import Block
from drafter_service.predictor import BlockSizePredictor
from drafter_service.random_weights import random_model, raw_config_for
from drafter_service.servicer import DrafterServicer
from drafter_service.tree import Part
from draftwire import gpu, tracing
from draftwire.config import ConfigError, effective
from draftwire.errors import DraftwireError
from draftwire.meters import Reading
from draftwire.v1 import drafter_pb2_grpc, types_pb2

log = structlog.get_logger(__name__)
# Grows with each field added to draftwire.v1.
PROTOCOL_MINOR = 1


class DrafterService:
    """What draftwire.runtime serves."""

    service_names: Sequence[str] = ("draftwire.v1.Drafter",)

    def __init__(self, config: Config) -> None:
        self._config = config
        self._door = _Door()
        self._engine: Engine | None = None
        self._servicer: DrafterServicer | None = None
        self._traces: tracing.Tracing | None = None
        self._gpu: gpu.GpuMeter | None = None

    def register(self, server: grpc.aio.Server) -> None:
        """Add the servicer; calls reach it once `start` has returned."""
        drafter_pb2_grpc.add_DrafterServicer_to_server(self._door, server)

    async def start(self) -> None:
        """Load checkpoint and target, warm the model. Raises ConfigError for what cannot be
        loaded.
        """
        config = self._config
        self._traces = tracing.from_environment("draftwire-drafter", os.environ)
        checkpoint, in_place = await asyncio.to_thread(_load, config)
        predictor = await asyncio.to_thread(_predictor, config, checkpoint)
        engine = Engine(checkpoint.model, _settings(config, checkpoint), predictor)
        self._engine = engine
        engine.start()
        await asyncio.wrap_future(engine.call(lambda: _warm(engine)))
        facts = Facts(
            name=config.name,
            version=types_pb2.ServiceVersion(
                package_version=_package_version(),
                protocol_minor=PROTOCOL_MINOR,
                instance_id=secrets.token_hex(8),
            ),
            checkpoint=checkpoint,
            settings=engine.settings,
            credits=config.credits,
            max_message_bytes=config.max_message_bytes,
            predictor=None if predictor is None else predictor.config,
        )
        servicer = DrafterServicer(
            engine,
            facts,
            handshake_timeout_s=config.handshake_timeout_s,
            effective=effective(config),
            in_place=in_place,
            traces=self._traces,
        )
        self._gpu = gpu.meter_of(checkpoint.model.device) if config.metrics_listen else None
        self._servicer = self._door.servicer = servicer
        log.info(
            "drafter loaded",
            checkpoint=checkpoint.name,
            trained=checkpoint.config.trained,
            device=str(checkpoint.model.device),
            dtype=str(checkpoint.model.dtype),
            block_size=engine.settings.block_size,
            parts=sorted(part.name.lower() for part in engine.settings.parts),
            predictor=None if predictor is None else predictor.config.input.value,
        )

    def progress(self) -> bool:
        """False while one drafting step lasts too long."""
        return self._engine is None or self._engine.progressing()

    async def drain(self) -> None:
        """Tell the lanes and wait for them to end."""
        if self._servicer is not None:
            await self._servicer.drain(self._config.drain_grace_s)

    async def close(self) -> None:
        """Stop the engine's thread, export what is left of the traces."""
        if self._engine is not None:
            await asyncio.to_thread(self._engine.stop)
        if self._traces is not None:
            await asyncio.to_thread(self._traces.close)

    def readings(self) -> Iterator[Reading]:
        """Everything the metrics show."""
        if self._engine is not None:
            yield from readings(self._engine)
        if self._servicer is not None:
            yield from self._servicer.totals.readings()
        if self._gpu is not None:
            yield from self._gpu.readings()


class _Door(drafter_pb2_grpc.DrafterServicer):
    """Registered before there is anything to serve; the runtime lets no call in until `servicer` is
    set.
    """

    servicer: DrafterServicer | None = None

    def Draft(self, request_iterator, context):  # type: ignore[no-untyped-def]
        """As DrafterServicer."""
        assert self.servicer is not None
        return self.servicer.Draft(request_iterator, context)

    async def GetInfo(self, request, context):  # type: ignore[no-untyped-def]
        """As DrafterServicer."""
        assert self.servicer is not None
        return await self.servicer.GetInfo(request, context)


def _load(config: Config) -> tuple[Checkpoint, TargetInPlace | None]:
    if config.threads:
        torch.set_num_threads(config.threads)
    device = _device(config.device)
    try:
        checkpoint = _checkpoint(config, device)
        checkpoint.model.lay_out()
        matrices = None
        if checkpoint.embedding is not None:
            # A checkpoint that brings matrices of its own was trained with them.
            matrices = targets.TargetMatrices(checkpoint.embedding, checkpoint.head)
        elif config.target is not None:
            matrices = targets.read_matrices(config.target)
        if matrices is None:
            return checkpoint, None
        rows, hidden = matrices.embedding.shape
        if hidden != checkpoint.config.hidden_size:
            raise CheckpointError(
                "target", f"{hidden} wide", f"hidden_size = {checkpoint.config.hidden_size} wide"
            )
        if checkpoint.config.mask_token_id >= rows:
            limit = f"less than the target's {rows} embedding rows"
            raise CheckpointError(
                "dflash_config.mask_token_id", checkpoint.config.mask_token_id, limit
            )
    except CheckpointError as error:
        raise ConfigError(
            "--checkpoint", config.checkpoint or config.target, f"usable: {error}"
        ) from error
    except DraftwireError as error:
        raise ConfigError("--target", config.target, f"usable: {error}") from error
    checkpoint.model.attach_target(
        matrices.embedding, matrices.head, vocab_size=rows, mask_embedding=checkpoint.mask_embedding
    )
    return checkpoint, TargetInPlace("", rows, hidden, from_lane=False)


def _checkpoint(config: Config, device: torch.device) -> Checkpoint:
    dtype = _dtype(config.dtype, device)
    seed = config.random_weights_seed
    if config.checkpoint is not None:
        return checkpoints.load(
            config.checkpoint,
            device=device,
            dtype=dtype,
            random_seed=seed,
            revision=config.revision,
        )
    assert config.target is not None
    assert seed is not None
    raw = raw_config_for(
        targets.read_config(config.target), block_size=config.block_size or 8, num_layers=2
    )
    model = random_model(parse(raw), seed).to(device, dtype or torch.float32)
    model.eval().requires_grad_(False)
    name = f"random-{targets.display_name(config.target)}"
    return Checkpoint(name, model.config, raw, model, checkpoints.sha256_of(model))


def _predictor(config: Config, checkpoint: Checkpoint) -> BlockSizePredictor | None:
    """The one that was named, or the one beside the drafter's weights; one made for another drafter
    is refused.
    """
    if config.predictor == "off":
        return None
    folder = Path(config.predictor).expanduser()
    if config.predictor == "auto":
        if checkpoint.folder is None or not predictors.present(checkpoint.folder):
            return None
        folder = checkpoint.folder
    model = checkpoint.model
    try:
        return predictors.load(
            folder,
            drafter_sha256=checkpoint.base_sha256,
            hidden_size=checkpoint.config.hidden_size,
            device=model.device,
            dtype=torch.float32 if model.device.type == "cpu" else None,
        )
    except CheckpointError as error:
        raise ConfigError("--predictor", config.predictor, f"usable: {error}") from error


def _settings(config: Config, checkpoint: Checkpoint) -> EngineSettings:
    parts = frozenset(Part[name.upper()] for name in config.draft_parts)
    if checkpoint.config.branches == 1:
        parts -= {Part.BRANCHES}
    if not parts:
        raise ConfigError("--draft-parts", "branches", "used with a checkpoint that has branches")
    positions = checkpoint.config.max_position_embeddings
    context = min(config.max_context or positions, positions)
    return EngineSettings(
        block_size=config.block_size or checkpoint.config.block_size,
        max_nodes=config.max_nodes,
        parts=parts,
        cache_rows=config.cache_rows,
        max_sessions=config.max_sessions,
        max_context=context,
        max_tokens=config.max_tokens,
        evict_idle_s=config.evict_idle_s,
        stall_s=config.stall_s,
        path_head=config.path_head,
        ngram_depth=config.ngram_depth,
    )


def _warm(engine: Engine) -> None:
    """One draft with nothing at stake, so that the first real one is not the slow one."""
    model, size = engine.model, engine.settings.block_size
    context = engine.pool.open(size + 8)
    try:
        model.extend(
            engine.pool, [(context, torch.zeros(8, model.config.hidden_size, dtype=model.dtype))]
        )
        if model.has_target:
            hidden = model.draft(engine.pool, [Block(0, context, size)])
            model.candidates(model.expand(hidden), 8)
        predictor = engine.predictor.predictor
        if predictor is not None:
            predictor.sizes(torch.zeros(1, predictor.config.input_size), [0.0])
    finally:
        engine.pool.close(context)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device", name, "cpu, there is no GPU here")
    return device


def _dtype(name: str, device: torch.device) -> torch.dtype | None:
    """None: the checkpoint's own."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else None
    found: torch.dtype = getattr(torch, name)
    return found


def _package_version() -> str:
    try:
        return importlib.metadata.version("draftwire")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"
