"""The handshake of a lane: whether this drafter can serve that target, and on what terms.

Pure: Hello in, HelloReply out, or a refusal that names both sides. Does not know streams or
threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from drafter_service.checkpoint import Checkpoint
from drafter_service.draft_config import DraftConfig
from drafter_service.engine import EngineSettings
from drafter_service.predictor import PredictorConfig
from drafter_service.tree import Part
from draftwire.codec import element_type
from draftwire.errors import DraftwireError, FailedPrecondition
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import types_pb2

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
FUSION = ("fc.weight", "hidden_norm.weight")
ENCODINGS = (pb.FEATURE_ENCODING_FUSED, pb.FEATURE_ENCODING_RAW)


@dataclass(frozen=True, slots=True)
class TargetInPlace:
    """The target whose matrices are attached now; `sha256` empty if they came from files."""

    sha256: str
    rows: int
    hidden: int
    from_lane: bool


@dataclass(frozen=True, slots=True)
class Facts:
    """What the drafter says of itself."""

    name: str
    version: types_pb2.ServiceVersion
    checkpoint: Checkpoint
    settings: EngineSettings
    credits: int
    max_message_bytes: int
    predictor: PredictorConfig | None = None

    @property
    def largest_block(self) -> int:
        """The largest block it may propose: the configured one, the predictor's, or as deep as
        repetition may go.
        """
        predicted = () if self.predictor is None else self.predictor.candidates
        repeated = self.settings.ngram_depth + 1 if Part.NGRAM in self.settings.parts else 0
        return max(self.settings.block_size, repeated, *predicted)


@dataclass(frozen=True, slots=True)
class Terms:
    """The reply and what follows from it."""

    reply: pb.HelloReply
    shapes_needed: dict[str, tuple[int, int]]
    raw_features: bool


def agree(
    hello: pb.Hello,
    facts: Facts,
    in_place: TargetInPlace | None,
    other_lanes: int,
    can_attach: Callable[[pb.CarrierOffer], bool],
) -> Terms:
    """The terms of a lane. `other_lanes`: lanes open now. `can_attach`: whether a ring on offer was
    proven usable. Raises FailedPrecondition naming what does not fit and what both sides have.
    """
    config = facts.checkpoint.config
    _check_target(hello, facts.name, config)
    encoding = next((choice for choice in hello.encodings if choice in ENCODINGS), None)
    if encoding is None:
        raise _refusal(
            "NO_COMMON_ENCODING",
            hello,
            facts.name,
            "encodings",
            list(hello.encodings),
            list(ENCODINGS),
        )
    needed = _tensors_needed(hello, facts, in_place, other_lanes)
    raw = encoding == pb.FEATURE_ENCODING_RAW
    carrier = next(
        (offer.kind for offer in hello.carriers if can_attach(offer)), types_pb2.CARRIER_KIND_INLINE
    )
    model, settings, predictor = facts.checkpoint.model, facts.settings, facts.predictor
    parts = sorted(settings.parts)
    reply = pb.HelloReply(
        version=facts.version,
        drafter_name=facts.name,
        weights_sha256=facts.checkpoint.sha256,
        trained=config.trained,
        encoding=encoding,
        feature_layers=config.target_layer_ids,
        mask_token_id=config.mask_token_id,
        feature_size=config.raw_feature_size if raw else config.hidden_size,
        feature_dtype=element_type(model.dtype),
        min_block_size=2,
        block_size=config.block_size,
        max_block_size=facts.largest_block,
        max_context=settings.max_context,
        verifier_carrier=carrier,
        credits=facts.credits,
        tensors_needed=needed,
        tensors_sent=() if raw else FUSION,
        hidden_norm_eps=config.rms_norm_eps,
        wants_last_logits=predictor is not None and predictor.input.from_logits,
        predicted_block_sizes=() if predictor is None else predictor.candidates,
        rules=[types_pb2.ACCEPTANCE_RULE_FOLLOW],
        parts=[int(part) for part in parts],  # type: ignore[misc]
        max_message_bytes=facts.max_message_bytes,
    )
    shape = (hello.target.embedding_rows, hello.target.hidden_size)
    return Terms(reply, dict.fromkeys(needed, shape), raw)


def _check_target(hello: pb.Hello, name: str, config: DraftConfig) -> None:
    target = hello.target
    if target.hidden_size != config.target_hidden_size:
        raise _refusal(
            "HIDDEN_SIZE_MISMATCH",
            hello,
            name,
            "hidden_size",
            target.hidden_size,
            config.target_hidden_size,
        )
    if not 0 < target.vocab_size <= target.embedding_rows:
        limit = f"in [1, embedding_rows = {target.embedding_rows}]"
        raise _refusal("VOCABULARY_MISMATCH", hello, name, "vocab_size", target.vocab_size, limit)
    # Either side may count the padding of the matrices or leave it out.
    if not target.vocab_size <= config.vocab_size <= target.embedding_rows:
        theirs = f"{target.vocab_size} in {target.embedding_rows} rows"
        raise _refusal("VOCABULARY_MISMATCH", hello, name, "vocab_size", theirs, config.vocab_size)
    if config.mask_token_id >= target.embedding_rows:
        raise _refusal(
            "MASK_TOKEN_OUT_OF_RANGE",
            hello,
            name,
            "embedding_rows",
            target.embedding_rows,
            config.mask_token_id,
        )
    for field in ("tokenizer_sha256", "vocabulary_sha256"):
        theirs, ours = getattr(target, field), getattr(config, field)
        if ours and theirs != ours:
            reason = "TOKENIZER_MISMATCH" if field == "tokenizer_sha256" else "VOCABULARY_MISMATCH"
            raise _refusal(reason, hello, name, field, theirs or "none", ours)
    if config.num_target_layers is not None and target.num_layers != config.num_target_layers:
        raise _refusal(
            "TARGET_LAYERS_MISMATCH",
            hello,
            name,
            "num_layers",
            target.num_layers,
            config.num_target_layers,
        )
    if max(config.target_layer_ids) >= target.num_layers:
        ours = list(config.target_layer_ids)
        raise _refusal(
            "FEATURE_LAYER_OUT_OF_RANGE", hello, name, "num_layers", target.num_layers, ours
        )


def _tensors_needed(
    hello: pb.Hello, facts: Facts, in_place: TargetInPlace | None, other_lanes: int
) -> list[str]:
    target = hello.target
    if in_place is not None:
        fits = (in_place.rows, in_place.hidden) == (
            target.embedding_rows,
            facts.checkpoint.config.hidden_size,
        )
        if fits and (
            not in_place.from_lane or (in_place.sha256 and in_place.sha256 == target.weights_sha256)
        ):
            return []
        if not in_place.from_lane:
            theirs = f"[{target.embedding_rows}, {target.hidden_size}]"
            ours = f"[{in_place.rows}, {in_place.hidden}]"
            raise _refusal("TARGET_MISMATCH", hello, facts.name, "embedding", theirs, ours)
        if other_lanes:
            theirs = target.weights_sha256 or "unnamed weights"
            raise _refusal(
                "ANOTHER_TARGET_IN_USE",
                hello,
                facts.name,
                "weights_sha256",
                theirs,
                in_place.sha256,
            )
    needed = [EMBEDDING]
    if HEAD in hello.tensors_on_offer:
        needed.append(HEAD)
    if EMBEDDING not in hello.tensors_on_offer:
        offered = list(hello.tensors_on_offer)
        raise _refusal(
            "TENSOR_NOT_ON_OFFER", hello, facts.name, "tensors_on_offer", offered, needed
        )
    return needed


def _refusal(
    reason: str, hello: pb.Hello, name: str, field: str, theirs: object, ours: object
) -> DraftwireError:
    verifier, target = hello.verifier_name or "verifier", hello.target.name or "its target"
    return FailedPrecondition(
        reason,
        f"{field}: verifier {verifier} with {target} has {theirs}, drafter {name} needs {ours}",
        field=field,
        verifier=theirs,
        drafter=ours,
        verifier_name=verifier,
        drafter_name=name,
        target=target,
    )
