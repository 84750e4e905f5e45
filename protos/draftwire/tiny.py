"""A tiny language model with drawn weights, for tests: everything is real but what it says.

Knows how its folder is written. It mostly goes on through the alphabet, so that its text can be
read and drafted; the rest is chance. A seed makes the same weights with every version of the
libraries. Imports numpy, safetensors and tokenizers lazily.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FORMAT = 1  # grows when what is written changes, so that a cached folder is not taken for it
CONTEXT = 2048
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD_DIM = 48, 4, 6, 2, 8
_SPREAD = 0.08  # of the layers' weights: what came before matters, but the last token most
_PULL = 10.0  # logit of the next letter: sampled at temperature 1 it is not always taken
_CYCLE = "abcdefghijklmnopqrstuvwxyz "
_SPECIAL = ("<|im_start|>", "<|im_end|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write(folder: Path, seed: int) -> None:
    """A Llama of 4 layers and a tokenizer of single bytes as a Hugging Face folder, 0.4 MB."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in _SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    begin, end = (tokenizer.token_to_id(token) for token in _SPECIAL)
    size = tokenizer.get_vocab_size()
    _write(
        folder / "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        bos_token=_SPECIAL[0],
        eos_token=_SPECIAL[1],
        chat_template=_TEMPLATE,
    )
    _write(
        folder / "config.json",
        architectures=["LlamaForCausalLM"],
        model_type="llama",
        vocab_size=size,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=_LAYERS,
        num_attention_heads=_HEADS,
        num_key_value_heads=_KV_HEADS,
        head_dim=_HEAD_DIM,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        tie_word_embeddings=False,
        bos_token_id=begin,
        eos_token_id=end,
        dtype="float32",
    )
    cycle = [vocabulary["Ġ" if letter == " " else letter] for letter in _CYCLE]
    _write_weights(folder / "model.safetensors", size, cycle, seed)


def _write(path: Path, **content: Any) -> None:
    path.write_text(json.dumps(content, indent=1), encoding="utf-8")


def _write_weights(path: Path, size: int, cycle: list[int], seed: int) -> None:
    import numpy as np
    from safetensors.numpy import save_file

    draw = np.random.RandomState(seed)  # the one generator whose numbers never change

    def normal(*shape: int) -> Any:
        return (_SPREAD * draw.standard_normal(shape)).astype(np.float32)

    ones = np.ones(_HIDDEN, np.float32)
    embedding = draw.standard_normal((size, _HIDDEN)).astype(np.float32)
    head = np.zeros_like(embedding)
    following = {token: cycle[(place + 1) % len(cycle)] for place, token in enumerate(cycle)}
    for token in range(size):  # what is not in the cycle leads into it
        head[following.get(token, cycle[token % len(cycle)])] += _PULL / _HIDDEN * embedding[token]
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": ones,
        "lm_head.weight": head,
    }
    outputs = {"q_proj": _HEADS, "k_proj": _KV_HEADS, "v_proj": _KV_HEADS}
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        for part, heads in outputs.items():
            weights[f"{name}.self_attn.{part}.weight"] = normal(heads * _HEAD_DIM, _HIDDEN)
        weights[f"{name}.self_attn.o_proj.weight"] = normal(_HIDDEN, _HEADS * _HEAD_DIM)
        weights[f"{name}.mlp.gate_proj.weight"] = normal(2 * _HIDDEN, _HIDDEN)
        weights[f"{name}.mlp.up_proj.weight"] = normal(2 * _HIDDEN, _HIDDEN)
        weights[f"{name}.mlp.down_proj.weight"] = normal(_HIDDEN, 2 * _HIDDEN)
        weights[f"{name}.input_layernorm.weight"] = ones
        weights[f"{name}.post_attention_layernorm.weight"] = ones
    save_file(weights, str(path), metadata={"format": "pt"})
