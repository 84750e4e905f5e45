"""Where a run starts, which part of the vocabulary it looks at, and what it keeps of the target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from training import kit

from drafter_service.draft_config import parse
from drafter_service.model import Layer
from drafter_service.random_weights import random_model, raw_config_for
from drafter_service.training.features import Capture, Trajectory, read_manifest
from drafter_service.training.initial import NotAlike, take_base, take_layers
from drafter_service.training.start import FrozenTarget, begin
from drafter_service.training.target import Target
from drafter_service.training.vocabulary import Vocabulary, most_used


def drafter_config(tiny: Target, **changes: object) -> dict[str, object]:
    raw = raw_config_for(
        tiny.host.model.config, block_size=4, num_layers=2, target_layer_ids=kit.LAYERS
    )
    return raw | changes


def test_layers_taken_over_give_context_the_keys_the_target_gives_it(tiny: Target) -> None:
    model = random_model(parse(drafter_config(tiny)), 0)
    take_layers(model, tiny.host.model, (2, 3))
    model.fc.weight.data[:, :48] = 0
    model.fc.weight.data[:, 48:] = torch.eye(48)
    features, _, _ = Capture(tiny, kit.LAYERS, 4).run(range(40, 60))
    # The last captured layer is the target's layer 2, so what it gives enters layer 3.
    theirs = tiny.host.model.get_decoder().layers[3]  # type: ignore[operator]
    with torch.no_grad():
        entering = theirs.input_layernorm(features[:, 48:].float())
        own = model.layers[1]
        assert isinstance(own, Layer)
        fused = model.fuse(features.float())
        for name in ("k_proj", "v_proj"):
            want = getattr(theirs.self_attn, name)(entering)
            got = getattr(own.self_attn, name)(fused)
            torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-3)


def test_layers_of_other_shapes_are_refused_by_name(tiny: Target) -> None:
    model = random_model(parse(drafter_config(tiny, intermediate_size=32)), 0)
    with pytest.raises(NotAlike, match=r"gate_proj"):
        take_layers(model, tiny.host.model, (2, 3))


def test_a_base_without_branches_may_be_given_some_but_not_other_layers(tiny: Target) -> None:
    base = random_model(parse(drafter_config(tiny)), 1)
    branched = random_model(parse(drafter_config(tiny, draftwire={"branches": 2})), 2)
    take_base(branched, base)
    assert torch.equal(branched.fc.weight, base.fc.weight)
    deeper = raw_config_for(
        tiny.host.model.config, block_size=4, num_layers=3, target_layer_ids=kit.LAYERS
    )
    with pytest.raises(NotAlike, match=r"layers\.2"):
        take_base(random_model(parse(deeper), 0), base)


def test_some_of_a_bases_layers_can_be_kept_in_their_order(tiny: Target) -> None:
    deeper = raw_config_for(
        tiny.host.model.config, block_size=4, num_layers=3, target_layer_ids=kit.LAYERS
    )
    base = random_model(parse(deeper), 1)
    model = random_model(parse(drafter_config(tiny)), 2)
    take_base(model, base, (0, 2))
    for own, theirs in ((0, 0), (1, 2)):
        left, right = model.layers[own].state_dict(), base.layers[theirs].state_dict()
        assert all(torch.equal(left[name], right[name]) for name in left)
    assert torch.equal(model.fc.weight, base.fc.weight)
    with pytest.raises(NotAlike):
        take_base(model, base, (0,))


def test_a_run_remembers_its_targets_hashes_and_layers(
    made_features: Path, tiny_folder: Path, tmp_path: Path
) -> None:
    target = FrozenTarget.load(str(tiny_folder), read_manifest(made_features))
    raw, model = begin(kit.run_config(made_features, tiny_folder, tmp_path), target)
    config = parse(raw)
    assert config == model.config
    assert config.trained
    assert config.vocabulary_sha256 == target.identity["vocabulary_sha256"]
    assert config.target_layer_ids == kit.LAYERS
    assert config.mask_token_id == target.embedding.shape[0] - 1


def test_features_and_likely_tokens_are_those_of_the_plain_model(tiny: Target) -> None:
    tokens = list(range(30, 55))
    features, top_ids, top_logprobs = Capture(tiny, kit.LAYERS, 8).run(tokens)
    model: Any = tiny.host.model
    before = model.config._attn_implementation
    assert before == "draftwire_paged"  # the capture gave the model back as it was
    model.set_attn_implementation("sdpa")
    try:
        with torch.inference_mode():
            output = model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    finally:
        model.set_attn_implementation(before)
    wanted = torch.cat([output.hidden_states[layer + 1][0] for layer in kit.LAYERS], dim=-1)
    torch.testing.assert_close(features.float(), wanted, atol=2e-2, rtol=1e-2)
    logprobs = torch.log_softmax(output.logits[0, :, : tiny.vocab_size], dim=-1)
    best, ids = logprobs.topk(8, dim=-1)
    torch.testing.assert_close(top_logprobs.float(), best, atol=1e-2, rtol=1e-2)
    assert (top_ids == ids).float().mean() > 0.98


def test_a_cut_holds_the_common_tokens_the_labels_and_some_others() -> None:
    vocabulary = Vocabulary(torch.tensor([1, 3, 5]), 20, 4)
    labels = torch.tensor([[3, 17], [-1, 5]])
    cut = vocabulary.cut(7, labels)
    assert {1, 3, 5, 17} <= set(cut.ids.tolist())
    assert 4 <= len(cut.ids) <= 8
    assert torch.equal(cut.ids, vocabulary.cut(7, labels).ids)
    assert not torch.equal(cut.ids, vocabulary.cut(8, labels).ids)
    assert torch.equal(cut.ids[cut.columns(torch.tensor([1, 17]))], torch.tensor([1, 17]))
    outside = next(i for i in range(20) if i not in set(cut.ids.tolist()))
    assert cut.columns(torch.tensor([outside, -1])).tolist() == [-1, -1]


def test_drawn_tokens_stand_for_all_that_were_not_drawn() -> None:
    vocabulary = Vocabulary(torch.arange(10), 200, 20)
    logits = torch.randn(200, generator=torch.Generator().manual_seed(3))
    whole = logits.exp().sum()
    sums = []
    for seed in range(400):
        cut = vocabulary.cut(seed, torch.tensor([150]))
        assert cut.shift is not None
        assert cut.shift[cut.columns(torch.tensor([3, 150]))].tolist() == [0.0, 0.0]
        sums.append((logits[cut.ids] + cut.shift).exp().sum())
    assert torch.stack(sums).mean() == pytest.approx(float(whole), rel=0.02)


def test_a_whole_vocabulary_is_kept_as_it_is() -> None:
    cut = Vocabulary(torch.arange(20), 20, 4).cut(7, torch.tensor([3]))
    assert torch.equal(cut.ids, torch.arange(20))


def test_the_most_used_tokens_are_those_said_or_expected(trajectories: list[Trajectory]) -> None:
    common = most_used(trajectories, 258, 100)
    assert len(common) == 100
    assert common.tolist() == sorted(common.tolist())
    weight = torch.zeros(258)
    for one in trajectories:
        weight += torch.bincount(one.tokens, minlength=258)
    # Random tokens are said about equally often; the target's expectations decide the rest.
    expected = torch.zeros(258)
    for one in trajectories:
        ids, chances = one.top_ids.reshape(-1).long(), one.top_logprobs.float().exp().reshape(-1)
        expected.index_add_(0, ids, chances)
    assert set(common.tolist()) == set((weight + expected).topk(100).indices.tolist())
    assert torch.equal(most_used(trajectories, 258, 0), torch.arange(258))
