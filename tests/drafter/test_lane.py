"""Lanes over real gRPC: handshake, steps, faults, and what is left when a lane ends in any way."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from drafter import kit
from drafter.peer import Peer, drafter, get_info, peer, settled, write_checkpoint

from drafter_service.draft_config import CheckpointError
from drafter_service.model import DraftModel
from draftwire import errors
from draftwire.carriers import SharedMemoryRing
from draftwire.codec import chunks, encode
from draftwire.v1 import drafter_pb2 as pb
from draftwire.v1 import types_pb2

CHAIN = {"draft_parts": ("argmax",)}


def run(main: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(main())  # type: ignore[arg-type]


def naive_chain(model: DraftModel, rows: torch.Tensor, anchor: int) -> list[int]:
    return kit.naive_logits(model, rows, anchor, 6)[1:].argmax(-1).tolist()


def test_the_handshake_tells_all_that_a_verifier_needs(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path, name="d1") as (_, address), peer(address, model) as lane:
            reply = await lane.shake_hands()
            assert reply.drafter_name == "d1"
            assert not reply.trained
            assert reply.encoding == pb.FEATURE_ENCODING_FUSED
            assert list(reply.feature_layers) == [1, 3, 4]
            assert (reply.mask_token_id, reply.feature_size) == (kit.MASK, kit.HIDDEN)
            # Repetition goes on past the slots of the block, down to --ngram-depth.
            assert (reply.block_size, reply.max_block_size, reply.min_block_size) == (6, 32, 2)
            assert reply.max_context == 512
            assert reply.feature_dtype == types_pb2.ELEMENT_TYPE_FLOAT32
            assert list(reply.tensors_needed) == ["embed_tokens.weight", "lm_head.weight"]
            assert list(reply.rules) == [types_pb2.ACCEPTANCE_RULE_FOLLOW]
            assert reply.credits >= 1
            assert reply.hidden_norm_eps == pytest.approx(1e-5)
            assert torch.equal(lane.weights["fc.weight"], model.fc.weight)
            assert torch.equal(lane.weights["hidden_norm.weight"], model.hidden_norm.weight)
            info = await get_info(address)
            assert (info.lanes, info.sessions, info.trained) == (1, 0, False)
            assert info.model.weights_sha256 == reply.weights_sha256
            assert info.config["name"] == "d1"

    run(main)


def test_a_second_lane_of_the_same_target_need_not_send_the_matrices_again(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with (
            drafter(tmp_path, **CHAIN) as (_, address),
            peer(address, model) as first,
            peer(address, model) as second,
        ):
            await first.shake_hands()
            reply = await second.shake_hands(verifier_name="other")
            assert list(reply.tensors_needed) == []
            response = await second.open((1, 9))
            opening, _ = second.opening(1, 9)
            want = naive_chain(model, second.rows(8, seed=1), opening.token_ids[-1])
            assert list(response.proposals[0].tree.token_ids) == want

    run(main)


HelloChange = tuple[dict[str, Any], str, str]
REFUSED: dict[str, HelloChange] = {
    "hidden size": ({"hidden_size": 64}, "HIDDEN_SIZE_MISMATCH", "64"),
    "vocabulary": ({"vocab_size": 50, "embedding_rows": 50}, "VOCABULARY_MISMATCH", "50"),
    "vocabulary larger than the rows": ({"vocab_size": 98}, "VOCABULARY_MISMATCH", "98"),
    "layers": ({"num_layers": 12}, "TARGET_LAYERS_MISMATCH", "12"),
    "encodings": ({"encodings": []}, "NO_COMMON_ENCODING", "[]"),
    "matrices": ({"tensors_on_offer": ["lm_head.weight"]}, "TENSOR_NOT_ON_OFFER", "lm_head"),
    "tokenizer": ({"tokenizer_sha256": "other"}, "TOKENIZER_MISMATCH", "other"),
}


@pytest.mark.parametrize(("changes", "reason", "value"), REFUSED.values(), ids=REFUSED.keys())
def test_a_target_that_does_not_fit_is_refused_naming_both_sides(
    tmp_path: Path, changes: dict[str, Any], reason: str, value: str
) -> None:
    model = write_checkpoint(tmp_path, draftwire={"tokenizer_sha256": "t1"})

    async def main() -> None:
        async with drafter(tmp_path, name="d1") as (_, address):
            async with peer(address, model) as lane:
                with pytest.raises(errors.FailedPrecondition) as caught:
                    await lane.shake_hands(**{"tokenizer_sha256": "t1"} | changes)
            assert caught.value.reason == reason
            assert "peer" in caught.value.message
            assert "d1" in caught.value.message
            assert value in caught.value.metadata["verifier"]
            # The next one that fits is served.
            async with peer(address, model) as lane:
                await lane.shake_hands(tokenizer_sha256="t1")
                assert len((await lane.open((1, 5))).proposals) == 1

    run(main)


@pytest.mark.parametrize(
    ("changes", "hello", "reason"),
    [
        ({"num_target_layers": None}, {"num_layers": 4}, "FEATURE_LAYER_OUT_OF_RANGE"),
        (
            {"dflash_config": {"mask_token_id": 500, "target_layer_ids": [1, 3, 4]}},
            {},
            "MASK_TOKEN_OUT_OF_RANGE",
        ),
        ({"draftwire": {"vocabulary_sha256": "v1"}}, {}, "VOCABULARY_MISMATCH"),
    ],
)
def test_a_checkpoint_that_needs_more_than_the_target_has_is_refused(
    tmp_path: Path, changes: dict[str, Any], hello: dict[str, Any], reason: str
) -> None:
    raw = kit.raw_config(**changes)
    from drafter_service import checkpoint
    from drafter_service.draft_config import parse
    from drafter_service.random_weights import random_model

    checkpoint.save(tmp_path, random_model(parse(raw), 1), raw)
    fits = kit.lively_model(kit.raw_config())

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, fits) as lane:
            with pytest.raises(errors.FailedPrecondition) as caught:
                await lane.shake_hands(**hello)
            assert caught.value.reason == reason

    run(main)


def test_another_target_is_refused_while_one_is_in_use_and_taken_afterwards(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address):
            async with peer(address, model) as first:
                await first.shake_hands(weights_sha256="a")
                async with peer(address, model) as second:
                    with pytest.raises(errors.FailedPrecondition) as caught:
                        await second.shake_hands(weights_sha256="b")
                assert caught.value.reason == "ANOTHER_TARGET_IN_USE"
                await first.send(close=pb.CloseLane())
                with pytest.raises(EOFError):
                    await first.read()
            await settled(address, sessions=0, lanes=0)
            async with peer(address, model) as third:
                assert len((await third.shake_hands(weights_sha256="b")).tensors_needed) == 2

    run(main)


BAD_FIRST: dict[
    str, tuple[Callable[[Peer], list[dict[str, Any]]], type[errors.DraftwireError], str]
] = {
    "a step before hello": (
        lambda lane: [{"step": pb.StepRequest(sequence=1)}],
        errors.InvalidArgument,
        "message",
    ),
    "a step before the weights": (
        lambda lane: [{"hello": lane.hello()}, {"step": pb.StepRequest(sequence=1)}],
        errors.InvalidArgument,
        "message",
    ),
    "weights nobody asked for": (
        lambda lane: [
            {"hello": lane.hello()},
            {"weights": next(chunks("other.weight", torch.ones(3), 100))},
        ],
        errors.InvalidArgument,
        "weights.name",
    ),
    "weights of another shape": (
        lambda lane: [
            {"hello": lane.hello()},
            {"weights": next(chunks("embed_tokens.weight", torch.ones(3, 3), 100))},
        ],
        errors.InvalidArgument,
        "embed_tokens.weight.shape",
    ),
}


@pytest.mark.parametrize(("messages", "kind", "field"), BAD_FIRST.values(), ids=BAD_FIRST.keys())
def test_a_handshake_out_of_order_ends_the_lane_with_a_typed_error(
    tmp_path: Path,
    messages: Callable[[Peer], list[dict[str, Any]]],
    kind: type[errors.DraftwireError],
    field: str,
) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            for message in messages(lane):
                await lane.send(**message)
            with pytest.raises(kind) as caught:
                await lane.read_to_the_end()
            assert caught.value.metadata["field"] == field
            await settled(address, sessions=0, lanes=0)

    run(main)


def test_a_handshake_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with (
            drafter(tmp_path, handshake_timeout_s=1.0) as (_, address),
            peer(address, model) as lane,
        ):
            await lane.send(hello=lane.hello())
            with pytest.raises(errors.DeadlineExceeded) as caught:
                await lane.read_to_the_end()
            assert caught.value.reason == "HANDSHAKE_TIMEOUT"

    run(main)


def test_rounds_of_a_session_draft_what_the_model_says(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path, **CHAIN) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            response = await lane.open((1, 9), (2, 4))
            opening, _ = lane.opening(1, 9)
            rows = lane.rows(8, seed=1)
            one = next(p for p in response.proposals if p.key.session_id == 1)
            assert list(one.tree.token_ids) == naive_chain(model, rows, opening.token_ids[-1])
            assert list(one.tree.parents) == [-1, 0, 1, 2, 3]
            assert (one.key.base_position, one.key.epoch, one.block_size) == (8, 1, 6)
            assert set(one.tree.parts) == {types_pb2.DRAFT_PART_ARGMAX}
            assert one.reason == types_pb2.BLOCK_SIZE_REASON_FIXED
            assert (response.sequence, response.ack_sequence) == (1, 1)
            assert response.service_time.ToNanoseconds() > response.model_time.ToNanoseconds() > 0
            base = 8
            for tokens in ([3], [4, 5, 6], [7, 8]):
                response = await lane.step(outcomes=[lane.outcome(1, base, tokens)])
                rows = torch.cat([rows, lane.rows(len(tokens), seed=1000 + base)])
                base += len(tokens)
                (proposal,) = response.proposals
                assert proposal.key.base_position == base
                assert list(proposal.tree.token_ids) == naive_chain(model, rows, tokens[-1])
            info = await settled(address, sessions=2, lanes=1)
            assert info.free_cache_rows < info.total_cache_rows
            ends = [pb.EndSession(key=lane.key(1, base)), pb.EndSession(key=lane.key(2, 3))]
            assert list((await lane.step(ends=ends)).proposals) == []
            info = await settled(address, sessions=0, lanes=1)
            assert info.free_cache_rows == info.total_cache_rows
            assert info.proposals == 5

    run(main)


def test_raw_features_and_a_shared_memory_ring_give_the_same_drafts(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        ring = SharedMemoryRing.create(slots=64, slot_bytes=4096)
        try:
            async with drafter(tmp_path, **CHAIN) as (_, address), peer(address, model) as lane:
                raw = [pb.FEATURE_ENCODING_RAW]
                reply = await lane.shake_hands(encodings=raw, carriers=[ring.offer()])
                assert reply.feature_size == 3 * kit.HIDDEN
                assert list(reply.tensors_sent) == []
                assert reply.verifier_carrier == types_pb2.CARRIER_KIND_SHARED_MEMORY
                opening, features = lane.opening(1, 9)
                rows = lane.rows(8, seed=1)
                features.rows.CopyFrom(encode(rows, ring))
                assert features.rows.WhichOneof("carrier") == "shared_memory"
                response = await lane.step(opens=[opening], features=[features])
                want = naive_chain(model, model.fuse(rows), opening.token_ids[-1])
                assert list(response.proposals[0].tree.token_ids) == want
        finally:
            ring.close()

    run(main)


def test_a_ring_that_cannot_be_proven_is_passed_over_for_inline(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            offer = pb.CarrierOffer(
                kind=types_pb2.CARRIER_KIND_SHARED_MEMORY,
                locality="elsewhere:1",
                ring_name="draftwire-" + "0" * 32,
                slot_bytes=4096,
                slots=4,
            )
            reply = await lane.shake_hands(carriers=[offer])
            assert reply.verifier_carrier == types_pb2.CARRIER_KIND_INLINE
            assert len((await lane.open((1, 5))).proposals) == 1

    run(main)


def test_a_bad_message_for_one_session_is_a_fault_of_that_session_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            await lane.open((1, 9), (2, 9), (3, 9), (4, 9))
            narrow = lane.outcome(1, 8, [5], features=encode(torch.zeros(1, 7)))
            whole = lane.outcome(2, 8, [5], features=encode(torch.zeros(1, kit.HIDDEN).int()))
            gap = lane.outcome(3, 9, [5])
            fine = lane.outcome(4, 8, [5])
            stranger = lane.outcome(9, 8, [5])
            response = await lane.step(outcomes=[narrow, whole, gap, fine, stranger])
            kinds = {fault.key.session_id: fault.kind for fault in response.faults}
            assert kinds == {
                1: pb.FAULT_KIND_BAD_TENSOR,
                2: pb.FAULT_KIND_BAD_TENSOR,
                3: pb.FAULT_KIND_OUT_OF_SYNC,
                9: pb.FAULT_KIND_UNKNOWN_SESSION,
            }
            assert [p.key.session_id for p in response.proposals] == [4]
            opening, features = lane.opening(1, 12, epoch=2)
            features.key.epoch = 2
            again = await lane.step(opens=[opening], features=[features])
            assert [p.key.base_position for p in again.proposals] == [11]

    run(main)


def test_steps_sent_ahead_are_answered_by_as_few_responses_as_there_were_batches(
    tmp_path: Path,
) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path, credits=2) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            for number in range(1, 9):  # more than the credits: read later, not refused
                opening, features = lane.opening(number, 6)
                await lane.send_step(opens=[opening], features=[features])
            seen: set[int] = set()
            acknowledged, responses = 0, 0
            while acknowledged < 8:
                step = (await lane.read()).step
                responses += 1
                assert step.sequence == responses
                assert step.ack_sequence > acknowledged
                acknowledged = step.ack_sequence
                seen |= {p.key.session_id for p in step.proposals}
            assert seen == set(range(1, 9))

    run(main)


def test_a_verifier_that_overdraws_its_credits_is_read_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path)
    entered, go_on = threading.Event(), threading.Event()
    original = DraftModel.draft

    def slow(self: DraftModel, pool: Any, blocks: Any) -> torch.Tensor:
        entered.set()
        assert go_on.wait(30)
        return original(self, pool, blocks)

    async def main() -> None:
        async with drafter(tmp_path, credits=2) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            monkeypatch.setattr(DraftModel, "draft", slow)
            pairs = [lane.opening(number, 6) for number in range(1, 13)]
            await lane.send_step(opens=[pairs[0][0]], features=[pairs[0][1]])
            assert await asyncio.to_thread(entered.wait, 30)
            for opening, features in pairs[1:]:
                await lane.send_step(opens=[opening], features=[features])
            for _ in range(5):  # round trips in which a reader without bounds would read them all
                await get_info(address)
            go_on.set()
            acknowledged = 0
            while acknowledged < len(pairs):
                step = (await lane.read()).step
                assert step.ack_sequence - acknowledged <= 2
                acknowledged = step.ack_sequence

    try:
        run(main)
    finally:
        go_on.set()


def test_a_step_out_of_order_ends_the_lane(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            await lane.open((1, 9))
            lane.sequence = 5
            with pytest.raises(errors.InvalidArgument) as caught:
                await lane.step()
            assert caught.value.metadata["field"] == "step.sequence"
            info = await settled(address, sessions=0, lanes=0)
            assert info.free_cache_rows == info.total_cache_rows

    run(main)


async def _close(lane: Peer) -> None:
    await lane.send(close=pb.CloseLane(reason="done"))
    with pytest.raises(EOFError):
        await lane.read()


async def _half_close(lane: Peer) -> None:
    await lane.call.done_writing()
    with pytest.raises(EOFError):
        await lane.read()


async def _cancel(lane: Peer) -> None:
    lane.call.cancel()


@pytest.mark.parametrize("end", [_close, _half_close, _cancel])
def test_however_a_lane_ends_its_sessions_are_freed_and_others_go_on(
    tmp_path: Path, end: Callable[[Peer], Awaitable[None]]
) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with (
            drafter(tmp_path) as (_, address),
            peer(address, model) as ending,
            peer(address, model) as staying,
        ):
            await ending.shake_hands()
            await staying.shake_hands()
            await staying.open((1, 30))
            before = await settled(address, sessions=1, lanes=2)
            await ending.open(*((number, 20) for number in range(1, 6)))
            await settled(address, sessions=6, lanes=2)
            await end(ending)
            after = await settled(address, sessions=1, lanes=1)
            assert after.free_cache_rows == before.free_cache_rows
            (proposal,) = (await staying.step(outcomes=[staying.outcome(1, 29, [4])])).proposals
            assert proposal.key.base_position == 30

    run(main)


def test_draining_is_told_on_every_lane_and_sessions_may_finish(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with (
            drafter(tmp_path, drain_grace_s=30.0) as (service, address),
            peer(address, model) as busy,
            peer(address, model) as idle,
        ):
            await busy.shake_hands()
            await idle.shake_hands()
            await busy.open((1, 9))
            service.stop_event.set()  # type: ignore[attr-defined]
            notice = await idle.read()
            assert notice.draining.grace.ToSeconds() == 30
            with pytest.raises(EOFError):
                await idle.read()
            assert (await busy.read()).HasField("draining")
            (proposal,) = (await busy.step(outcomes=[busy.outcome(1, 8, [4])])).proposals
            assert proposal.key.base_position == 9
            await busy.step(ends=[pb.EndSession(key=busy.key(1, 9))])
            with pytest.raises(EOFError):
                await busy.read()

    run(main)


def test_matrices_from_files_need_not_come_over_the_lane(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    model = write_checkpoint(tmp_path / "draft")
    embedding, head = kit.target_matrices(model.config)
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text('{"tie_word_embeddings": false}')
    save_file(
        {"model.embed_tokens.weight": embedding, "lm_head.weight": head},
        target / "model.safetensors",
    )

    async def main() -> None:
        async with (
            drafter(tmp_path / "draft", target=str(target), **CHAIN) as (_, address),
            peer(address, model) as lane,
        ):
            reply = await lane.shake_hands()
            assert list(reply.tensors_needed) == []
            response = await lane.open((1, 9))
            opening, _ = lane.opening(1, 9)
            want = naive_chain(model, lane.rows(8, seed=1), opening.token_ids[-1])
            assert list(response.proposals[0].tree.token_ids) == want
            async with peer(address, model) as other:
                with pytest.raises(errors.FailedPrecondition) as caught:
                    await other.shake_hands(embedding_rows=kit.VOCAB + 8)
                assert caught.value.reason == "TARGET_MISMATCH"

    run(main)


def test_a_checkpoint_that_cannot_be_loaded_stops_the_service_with_the_reason(
    tmp_path: Path,
) -> None:
    from draftwire.config import ConfigError

    async def main() -> None:
        with pytest.raises(ConfigError, match=r"config\.json") as caught:
            async with drafter(tmp_path):
                pass
        assert isinstance(caught.value.__cause__, CheckpointError)

    run(main)


def test_an_end_for_a_reason_of_a_newer_verifier_ends_the_session_and_not_the_lane(
    tmp_path: Path,
) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            await lane.open((1, 5), (2, 5))
            answer = await lane.step(ends=[pb.EndSession(key=lane.key(1, 4), reason=99)])
            assert not answer.faults
            assert (await settled(address, 1, 1)).sessions == 1
            answer = await lane.step(outcomes=[lane.outcome(2, 4, [7])])
            assert [p.key.session_id for p in answer.proposals] == [2]

    run(main)


def test_a_bias_that_cannot_be_used_costs_no_session_its_draft(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            pairs = [lane.opening(number, 5) for number in (1, 2)]
            bias = pairs[0][0].sampling.logit_bias
            bias[kit.VOCAB], bias[2**32 - 1], bias[3] = 5.0, 5.0, float("nan")
            bias[7] = 100.0
            answer = await lane.step(opens=[p[0] for p in pairs], features=[p[1] for p in pairs])
            assert not answer.faults
            assert [p.key.session_id for p in answer.proposals] == [1, 2]
            assert answer.proposals[0].tree.token_ids[0] == 7

    run(main)


def test_a_temperature_that_is_greedy_for_the_target_is_greedy_here(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path)

    async def main() -> None:
        trees = []
        async with drafter(tmp_path) as (_, address), peer(address, model) as lane:
            await lane.shake_hands()
            for number, temperature in ((1, 0.0), (2, 1e-45), (3, 9e-6)):
                opening, features = lane.opening(1, 5)
                key = lane.key(number, 4)
                opening.key.CopyFrom(key)
                features.key.CopyFrom(key)
                opening.sampling.temperature = temperature
                answer = await lane.step(opens=[opening], features=[features])
                trees.append(answer.proposals[0].tree)
        assert len(trees[0].token_ids) > 1
        assert trees[1] == trees[0] == trees[2]

    run(main)
