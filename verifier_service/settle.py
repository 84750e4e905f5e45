"""What the handshake settles, from the verifier's side.

Knows: which HelloReply fits this target, and how features are fused with the drafter's own weights.
Pure. Does not know: streams.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from draftwire.codec import torch_dtype
from draftwire.errors import FailedPrecondition
from draftwire.v1 import drafter_pb2
from verifier_service.lane import LaneFacts

Encoding = drafter_pb2.FeatureEncoding
_LEAST_MESSAGE = 64 * 1024  # bytes; as of the setting of both services


def settle(hello: drafter_pb2.Hello, reply: drafter_pb2.HelloReply, target: str) -> LaneFacts:
    """The facts of the lane. Raises FailedPrecondition naming both sides if the two do not fit."""
    if (
        reply.version.protocol_minor > hello.version.protocol_minor
        and "requires-newer" in reply.features
    ):
        raise _refuse("protocol_minor", hello.version.protocol_minor, reply.version.protocol_minor)
    layers = tuple(reply.feature_layers)
    if not layers or max(layers) >= hello.target.num_layers:
        raise _refuse("feature_layers", f"layers below {hello.target.num_layers}", list(layers))
    width = hello.target.hidden_size * (
        1 if reply.encoding == Encoding.FEATURE_ENCODING_FUSED else len(layers)
    )
    if reply.encoding not in hello.encodings:
        raise _refuse("encoding", list(hello.encodings), reply.encoding)
    if reply.feature_size != width and reply.encoding == Encoding.FEATURE_ENCODING_RAW:
        raise _refuse("feature_size", width, reply.feature_size)
    if reply.max_block_size < 2:
        raise _refuse("max_block_size", "at least 2", reply.max_block_size)
    if not reply.credits:
        raise _refuse("credits", "at least 1", reply.credits)
    if 0 < reply.max_message_bytes < _LEAST_MESSAGE:  # 0: it does not say
        raise _refuse("max_message_bytes", f"at least {_LEAST_MESSAGE}", reply.max_message_bytes)
    return LaneFacts(
        target=target,
        name=reply.drafter_name,
        weights_sha256=reply.weights_sha256,
        trained=reply.trained,
        feature_layers=layers,
        block_size=reply.block_size,
        max_block_size=min(reply.max_block_size, hello.max_block_size),
        max_context=reply.max_context,
        credits=reply.credits,
        wants_last_logits=reply.wants_last_logits,
        max_message_bytes=min(
            reply.max_message_bytes or hello.max_message_bytes, hello.max_message_bytes
        ),
        predicted_block_sizes=tuple(reply.predicted_block_sizes),
    )


def _refuse(field: str, verifier: object, drafter: object) -> FailedPrecondition:
    return FailedPrecondition(
        "HANDSHAKE_MISMATCH",
        f"{field}: the verifier has {verifier}, the drafter {drafter}",
        field=field,
        verifier=verifier,
        drafter=drafter,
    )


class Fusion:
    """Turns raw features into what the drafter wants: RMSNorm(fc(features)) (DFlash's context
    feature), or as they are."""

    def __init__(
        self,
        reply: drafter_pb2.HelloReply,
        raw_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._raw_size = raw_size
        self._needed = set(reply.tensors_sent)
        self._fused = reply.encoding == Encoding.FEATURE_ENCODING_FUSED
        self._size = reply.feature_size
        self._eps = reply.hidden_norm_eps
        self._dtype, self._device = dtype, device
        self._wire_dtype = torch_dtype(reply.feature_dtype)
        self._weights: dict[str, torch.Tensor] = {}

    def take(self, name: str, tensor: torch.Tensor) -> None:
        """A fusion tensor that the drafter sent."""
        self._weights[name] = tensor.to(device=self._device, dtype=torch.float32)

    def check(self) -> None:
        """Raise FailedPrecondition if something is missing or of the wrong shape."""
        if not self._fused:
            return
        missing = {"fc.weight", "hidden_norm.weight"} - self._weights.keys()
        if missing:
            raise _refuse("tensors_sent", "fc.weight and hidden_norm.weight", sorted(self._weights))
        shape = tuple(self._weights["fc.weight"].shape)
        if shape != (self._size, self._raw_size) or self._weights["hidden_norm.weight"].shape != (
            self._size,
        ):
            raise _refuse("fc.weight", [self._size, self._raw_size], list(shape))

    @torch.inference_mode()
    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Features [rows, layers * hidden] -> [rows, feature_size] in the drafter's dtype. Not part
        of the invariant arithmetic: what the drafter sees never decides a token."""
        if not self._fused:
            return rows.to(self._wire_dtype)
        mixed = F.linear(rows.float(), self._weights["fc.weight"])
        normed = F.rms_norm(mixed, (self._size,), self._weights["hidden_norm.weight"], self._eps)
        return normed.to(self._wire_dtype)
