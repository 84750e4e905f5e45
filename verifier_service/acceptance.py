"""Logits of a step to what each of its rounds commits: dispatch by device.

Knows: on the device, rule `follow` of all rounds in one launch sequence, logits edited before the
walk where a request asks for it, and the trees' accepted paths compacted behind it, with one read
back by the host; elsewhere, `walk.follow` round by round, which is the reference. Does not know:
sessions, stops, the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from draftwire_kernels.edits import edits_logits, round_edits
from draftwire_kernels.rounds import RoundTrees, RowParams, round_trees, row_params
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import NonFiniteRow, Verdict, follow, most_likely, target_logprobs
from verifier_service.cache import PagedStore
from verifier_service.model import StepOutput

if TYPE_CHECKING:  # Triton is there only where its kernels run
    from draftwire_kernels.walk_triton import Walks

_FOUND = ("", "NaN", "+inf", "no finite entry")


@dataclass(frozen=True, slots=True)
class Round:
    """One session's draw in a step."""

    feed: int
    """Which feed of the step it is; its logit rows are the anchor's and then the tree's."""
    tree: TokenTree
    sampling: Sampling
    position: int
    """Of the first token drawn."""
    history: History | None
    logprobs: bool = False
    top_logprobs: int = 0


def accept(
    output: StepOutput, rounds: Sequence[Round], store: PagedStore, vocab_size: int
) -> list[Verdict | NonFiniteRow]:
    """What each round commits, or the bad row on its path: it fails that round and no other.

    On the device path the slots of accepted paths are compacted in `store` when this returns; see
    `compacts`.
    """
    # Embeddings may be padded past the tokenizer's ids; those are never drawn.
    logits = output.logits[:, :vocab_size]
    if compacts(output):
        return _on_device(logits, output, rounds, store) if rounds else []
    verdicts: list[Verdict | NonFiniteRow] = []
    for item in rounds:
        start = output.packed.logit_offsets[item.feed]
        try:
            verdict = follow(
                logits[start : start + len(item.tree) + 1],
                item.tree,
                item.sampling,
                position=item.position,
                history=item.history,
                want_logprobs=item.logprobs,
                top_logprobs=item.top_logprobs,
            )
        except NonFiniteRow as error:
            verdicts.append(error)
        else:
            verdicts.append(verdict)
    return verdicts


def compacts(output: StepOutput) -> bool:
    """Whether `accept` brings accepted paths to consecutive slots itself."""
    return output.packed.plan is not None


def _on_device(
    logits: torch.Tensor, output: StepOutput, rounds: Sequence[Round], store: PagedStore
) -> list[Verdict | NonFiniteRow]:
    from draftwire_kernels.walk_triton import follow_rows

    device = logits.device
    trees, params = _packed(rounds, device)
    edited = [i for i, item in enumerate(rounds) if edits_logits(item.sampling)]
    where = torch.tensor(edited, dtype=torch.int64).to(device, non_blocking=True)
    if edited:
        # These are drawn from fp32 rows of their own; in the first sequence they are padding.
        plain = torch.ones(len(rounds), dtype=torch.bool, device=device)
        plain[where] = False
        params = replace(params, owner=torch.where(plain[params.owner.long()], params.owner, -1))
    walks = follow_rows(logits, trees, params)
    if edited:
        own = _follow_edited(
            torch.cat([_rows_of(logits, output, rounds[i]) for i in edited]).float(),
            [rounds[i] for i in edited],
            trees,
        )
        for name in ("count", "token", "logprob", "path", "status", "row"):
            getattr(walks, name).index_copy_(0, where, getattr(own, name))
    _compact(output, rounds, walks.path, store)
    # The one place where the host waits.
    head = torch.stack([walks.count, walks.status, walks.row], 1)
    told = torch.cat([head, walks.token, walks.path], 1).tolist()
    logprobs = walks.logprob.tolist() if any(item.logprobs for item in rounds) else None
    first_node = 3 + trees.deepest + 1
    verdicts: list[Verdict | NonFiniteRow] = []
    for index, (item, line) in enumerate(zip(rounds, told, strict=True)):
        count, status, row = line[:3]
        if status:
            verdicts.append(NonFiniteRow(row, _FOUND[status]))
            continue
        verdict = Verdict(
            path=tuple(line[first_node : first_node + count - 1]),
            tokens=tuple(line[3 : 3 + count]),
            logprobs=tuple(logprobs[index][:count]) if logprobs and item.logprobs else None,
        )
        if item.top_logprobs:
            verdict = _with_top(verdict, item, _rows_of(logits, output, item))
        verdicts.append(verdict)
    return verdicts


def _packed(
    rounds: Sequence[Round], device: torch.device, widest: int = 0, deepest: int = 0
) -> tuple[RoundTrees, RowParams]:
    trees = round_trees([item.tree for item in rounds], device, widest=widest, deepest=deepest)
    samplings, positions = zip(*((item.sampling, item.position) for item in rounds), strict=True)
    return trees, row_params(samplings, positions, trees.owner, trees.depth)


def _follow_edited(logits: torch.Tensor, rounds: Sequence[Round], whole: RoundTrees) -> Walks:
    """follow_rows of rounds with bias, penalties or bans; logits fp32, a copy to be edited."""
    from draftwire_kernels.edits_triton import edit_rows
    from draftwire_kernels.walk_triton import follow_rows

    # As wide and deep as the step, so that the results fit the step's.
    trees, params = _packed(rounds, logits.device, whole.widest, whole.deepest)
    edits = round_edits(
        [item.sampling for item in rounds],
        [item.history for item in rounds],
        [item.tree for item in rounds],
        logits.shape[1],
        logits.device,
    )
    edit_rows(logits, trees, params, edits)
    return follow_rows(logits, trees, params)


def _rows_of(logits: torch.Tensor, output: StepOutput, item: Round) -> torch.Tensor:
    start = output.packed.logit_offsets[item.feed]
    return logits[start : start + len(item.tree) + 1]


def _compact(
    output: StepOutput, rounds: Sequence[Round], path: torch.Tensor, store: PagedStore
) -> None:
    """Bring the accepted paths of trees to the places after their anchors, before the host knows
    them."""
    plan = output.packed.plan
    if plan is None or plan.is_chain or path.shape[1] == 0:
        return
    from draftwire_kernels.pages_triton import compact_path

    every = torch.full((len(output.packed.offsets), path.shape[1]), -1, dtype=torch.int32)
    every = every.to(path.device, non_blocking=True)
    feeds = torch.tensor([item.feed for item in rounds], dtype=torch.int64)
    every.index_copy_(0, feeds.to(path.device, non_blocking=True), path)
    for pools in store.stacks():
        compact_path(pools, plan, every)


def _with_top(verdict: Verdict, item: Round, rows: torch.Tensor) -> Verdict:
    """The same with the most likely tokens of each committed one, made on the host by the
    reference: few ask for them."""
    top = []
    added = 0
    try:
        for step, token in enumerate(verdict.tokens):
            row = target_logprobs(
                rows[verdict.path[step - 1] + 1 if step else 0],
                item.sampling,
                position=item.position + step,
                history=item.history,
            )
            top.append(most_likely(row.cpu().numpy(), item.top_logprobs))
            if item.history is not None:
                item.history.append(token)
                added += 1
    finally:
        for _ in range(added):
            assert item.history is not None
            item.history.pop()
    return replace(verdict, top=tuple(top))
