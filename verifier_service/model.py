"""Hosts the target model.

Knows: loading any Hugging Face causal LM with an ordinary decoder, running one packed step through
it, and catching the outputs of the feature layers on the way. Does not know: sessions, proposals,
sampling, gRPC.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from draftwire.errors import FailedPrecondition
from draftwire.models import ModelSource
from draftwire_kernels import products
from verifier_service import attention, numerics
from verifier_service.cache import CacheShape, PagedStore
from verifier_service.packing import Feed, Packed, bucket, pack

Kernels = Literal["auto", "triton", "reference"]


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Logits [M, vocabulary] of the rows asked for, in the model's dtype."""

    logits: torch.Tensor
    packed: Packed

    def of(self, feed: int, count: int) -> torch.Tensor:
        """Logits [count, vocabulary] of one feed."""
        start = self.packed.logit_offsets[feed]
        return self.logits[start : start + count]


class TargetHost:
    """The target model with its row plan. One thread uses it."""

    def __init__(
        self,
        model: nn.Module,
        *,
        invariant: bool = True,
        kernels: Kernels = "auto",
        keep_weights: bool = True,
    ) -> None:
        """`kernels`: Triton's for attention and acceptance (auto: on CUDA), or the reference.
        `keep_weights`: leave the model's weights as they are, for others to read; else a CPU's are
        kept once, in the layout its products want, and `tensor` gives them as they were.
        """
        self.model = model.eval()
        config: Any = model.config.get_text_config()  # type: ignore[operator,union-attr]
        self._config = config
        self.hidden_size = int(config.hidden_size)
        self.num_layers = int(config.num_hidden_layers)
        self.num_heads = int(config.num_attention_heads)
        self.kv_heads = int(getattr(config, "num_key_value_heads", None) or self.num_heads)
        self.head_dim = int(getattr(config, "head_dim", None) or self.hidden_size // self.num_heads)
        self.max_context = int(config.max_position_embeddings)
        embedding: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]
        self.embedding_rows = int(embedding.weight.shape[0])
        self.dtype = embedding.weight.dtype
        self.device = embedding.weight.device
        self._captured: dict[int, torch.Tensor] = {}
        self._layers = _decoder_layers(model, self.num_layers)
        self._hooks: dict[int, Any] = {}
        self.invariant = invariant
        self.kernels = kernels == "triton" or (kernels == "auto" and self.device.type == "cuda")
        head: Any = model.get_output_embeddings()  # type: ignore[operator]
        self._tied = head.weight.data_ptr() == embedding.weight.data_ptr()
        with torch.inference_mode():
            self.plan = (
                numerics.certify(model, self.num_heads, self.kv_heads, self.head_dim)
                if invariant
                else numerics.fast(model)
            )
        if self.plan.packed:
            products.pack(model, replaced=not keep_weights)
        if self.plan.chunk is not None:
            numerics.cut_products(model, self.plan.chunk, pad=True)
        elif invariant:
            # A step may have more rows than were certified at once.
            numerics.cut_products(model, self.plan.buckets[-1], pad=False)

    @property
    def cache_shape(self) -> CacheShape:
        return CacheShape(self.num_layers, self.kv_heads, self.head_dim, self.hidden_size)

    @property
    def most_session_rows(self) -> int:
        """Rows of one session in a step for which attention's shared products were certified."""
        shared = self.invariant and self.plan.share_attention and not self.kernels
        return self.plan.attention_rows[-1] if shared else sys.maxsize

    def capture(self, layer: int) -> None:
        """Catch the output of decoder layer `layer` (0-based) in every step from now on."""
        if layer in self._hooks:
            return

        def keep(_module: nn.Module, _inputs: Any, output: Any) -> None:
            self._captured[layer] = output[0] if isinstance(output, tuple) else output

        self._hooks[layer] = self._layers[layer].register_forward_hook(keep)

    @torch.inference_mode()
    def step(self, feeds: Sequence[Feed], store: PagedStore) -> StepOutput:
        """Run `feeds` through the model as one packed step: writes KV and features to `store`,
        returns the logits wanted."""
        if self._config._attn_implementation != attention.IMPLEMENTATION:
            # Any other would look at this step's rows alone, and say nothing.
            raise RuntimeError(
                f"the target's attention is {self._config._attn_implementation}, not "
                f"{attention.IMPLEMENTATION}"
            )
        packed = pack(
            feeds,
            self.plan.buckets,
            self.plan.attention_rows,
            self.device,
            invariant=self.invariant,
            share=self.plan.share_attention,
            most_tail=self.plan.most_tail,
            page_size=store.page_size if self.kernels else 0,
        )
        keep = self._logit_rows(packed)
        context = attention.AttentionContext(store, packed, self.invariant)
        output = self.model(
            input_ids=packed.token_ids[None],
            position_ids=packed.positions[None],
            use_cache=False,
            logits_to_keep=keep,
            draftwire=context,
        )
        for layer, rows in store.features.items():
            rows.index_copy_(0, packed.write_slots, self._captured[layer][0].to(rows.dtype))
        self._captured.clear()
        return StepOutput(output.logits[0, : len(packed.logit_rows)], packed)

    def _logit_rows(self, packed: Packed) -> torch.Tensor:
        """The rows whose logits are computed: those asked for, padded to a bucket so that the head
        is invariant too."""
        wanted = packed.logit_rows
        padding = bucket(max(1, len(wanted)), self.plan.buckets) - len(wanted)
        return torch.cat([wanted, wanted.new_zeros(padding)]) if padding else wanted

    def tensor_names(self) -> list[str]:
        """Frozen tensors a drafter may ask for; a head tied to the embedding is not a second
        one."""
        return ["embed_tokens.weight"] if self._tied else ["embed_tokens.weight", "lm_head.weight"]

    def tensor(self, name: str) -> torch.Tensor:
        """A frozen tensor the drafter may ask for: "embed_tokens.weight" or "lm_head.weight"."""
        modules = {
            "embed_tokens.weight": "get_input_embeddings",
            "lm_head.weight": "get_output_embeddings",
        }
        if name not in modules:
            raise FailedPrecondition(
                "UNKNOWN_TENSOR", f"tensor {name!r} is not on offer", tensor=name
            )
        module = getattr(self.model, modules[name])()
        return _dense(module.weight.detach())


def _dense(weight: torch.Tensor) -> torch.Tensor:
    """A weight in the layout it was loaded in."""
    return weight.to_dense() if weight.is_mkldnn else weight


def _decoder_layers(model: nn.Module, count: int) -> nn.ModuleList:
    for module in model.modules():
        if (
            isinstance(module, nn.ModuleList)
            and len(module) == count
            and hasattr(module[0], "self_attn")
        ):
            return module
    raise FailedPrecondition(
        "UNSUPPORTED_MODEL", "the model has no list of decoder layers with self_attn"
    )


def load_model(
    source: ModelSource, dtype: torch.dtype, device: str, *, revision: str | None = None
) -> nn.Module:
    """Load `source` (unpacked, if it was a GGUF) with paged attention. Safetensors only."""
    from transformers import AutoModelForCausalLM

    attention.register()
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        source.location,
        dtype=dtype,
        attn_implementation=attention.IMPLEMENTATION,
        use_safetensors=True,
        revision=revision or "main",
    )
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer(source: ModelSource, *, revision: str | None = None) -> Any:
    """The tokenizer that belongs to `source`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.location, revision=revision or "main")


def auto_dtype(device: str) -> torch.dtype:
    """bfloat16 on GPUs and on processors with bf16 products, float32 elsewhere: there bf16 is many
    times slower."""
    if device != "cpu":
        return torch.bfloat16
    return (
        torch.bfloat16
        if torch.ops.mkldnn._is_mkldnn_bf16_supported() and _has_bf16_products()
        else torch.float32
    )


def _has_bf16_products() -> bool:
    capability = torch.backends.cpu.get_cpu_capability()
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    return capability.startswith("AVX512") and (probe is None or bool(probe()))


def weights_digest(model: nn.Module) -> str:
    """SHA-256 over the names and shapes of all weights and a fixed sample of the values of each."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        flat = _dense(weight.detach()).reshape(-1)
        sample = flat[:: max(1, flat.numel() // 64)][:64].float().cpu()
        digest.update(json.dumps([name, list(weight.shape)]).encode())
        digest.update(sample.numpy().tobytes())
    return digest.hexdigest()
