"""The kernels against the host's references, on a GPU or, at tiny sizes, interpreted.

Knows the references and the kernels' public functions. Each check yields a line for every
disagreement and nothing else; it measures nothing.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from bench.kernel_cases import Sizes

from draftwire_kernels import (
    attention,
    attention_cpu,
    attention_triton,
    edits_triton,
    noise,
    noise_triton,
    pages,
    pages_triton,
    rounds,
    sparse_triton,
    walk_triton,
)
from draftwire_kernels.accept import Rule, accept
from draftwire_kernels.accept_triton import accept_rows
from draftwire_kernels.draft_probs import DraftProbs
from draftwire_kernels.edits import round_edits
from draftwire_kernels.rows import normalise, target_scores
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from draftwire_kernels.walk import draw, follow

SAMPLINGS = [
    Sampling(seed=2**64 - 7),
    Sampling(temperature=0.0),
    Sampling(temperature=0.7, top_k=20, top_p=0.8, seed=3),
    Sampling(temperature=1.5, top_p=0.95, seed=4),
    Sampling(min_p=0.05, seed=5),
]


def a_round(
    samplings: list[Sampling],
    vocab: int,
    nodes: int,
    dtype: torch.dtype,
    seed: int,
    histories: Sequence[History | None] = (),
) -> tuple[list[torch.Tensor], list[TokenTree], list[int]]:
    """Logits [nodes + 1, V], a tree that is often right, and the first position, a session."""
    rng = np.random.default_rng(seed)
    logits, trees, positions = [], [], []
    for session, sampling in enumerate(samplings):
        rows = torch.from_numpy(rng.standard_normal((nodes + 1, vocab), dtype=np.float32) * 4)
        logits.append(rows.to(dtype))
        positions.append(int(rng.integers(1, 10_000)))
        parents = [int(rng.integers(max(-1, node - 3), node)) for node in range(nodes)]
        if session % 2:
            parents = list(range(-1, nodes - 1))
        depths = TokenTree((0,) * nodes, tuple(parents)).depths()
        tokens = []
        history = histories[session] if histories else None
        for parent, depth in zip(parents, depths, strict=True):
            here = positions[-1] + depth - 1
            scores = target_scores(logits[-1][parent + 1], sampling, position=here, history=history)
            right = draw(scores, sampling, here)
            tokens.append(right if rng.random() < 0.8 else int(rng.integers(vocab)))
        trees.append(TokenTree(tuple(tokens), tuple(parents)))
    return logits, trees, positions


def check_follow(device: str, samplings: list[Sampling], vocab: int, nodes: int) -> Iterator[str]:
    """follow_rows against walk.follow."""
    for dtype in (torch.bfloat16, torch.float32):
        logits, trees, positions = a_round(samplings, vocab, nodes, dtype, 1)
        packed = rounds.round_trees(trees, device)
        params = rounds.row_params(samplings, positions, packed.owner, packed.depth)
        device_logits = torch.cat(logits).to(device)
        got = walk_triton.follow_rows(device_logits, packed, params)
        again = walk_triton.follow_rows(device_logits, packed, params)
        if not torch.equal(got.token, again.token) or not torch.equal(got.logprob, again.logprob):
            yield f"follow {dtype}: two runs differ"
        for s, tree in enumerate(trees):
            want = follow(logits[s], tree, samplings[s], position=positions[s], want_logprobs=True)
            count = int(got.count[s])
            if got.token[s, :count].tolist() != list(want.tokens):
                yield f"follow {dtype} session {s}: {got.token[s].tolist()}, want {want.tokens}"
            elif not np.allclose(got.logprob[s, :count].tolist(), want.logprobs or (), atol=1e-4):
                yield f"follow {dtype} session {s}: log-probabilities differ"


def check_edits(device: str, vocab: int, nodes: int) -> Iterator[str]:
    """edit_rows before follow_rows against walk.follow: bias, penalties along the path, bans."""
    samplings = [
        Sampling(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, seed=6),
        Sampling(temperature=0.0, logit_bias=((3, 9.0), (7, -2.0)), repetition_penalty=0.8),
        Sampling(top_p=0.9, banned_ids=tuple(range(0, vocab, 3)), banned_before=2**40, seed=7),
    ]
    histories = [History(vocab, range(0, vocab, 5)), History(vocab, [1, 2, 2]), None]
    for history in histories[:2]:
        for token in (4, 5, 5, 9):
            history.append(token)
    logits, trees, positions = a_round(samplings, vocab, nodes, torch.bfloat16, 8, histories)
    packed = rounds.round_trees(trees, device)
    params = rounds.row_params(samplings, positions, packed.owner, packed.depth)
    rows = torch.cat(logits).to(device).float()
    tables = round_edits(samplings, histories, trees, vocab, device)
    edits_triton.edit_rows(rows, packed, params, tables)
    got = walk_triton.follow_rows(rows, packed, params)
    for s, tree in enumerate(trees):
        want = follow(
            logits[s], tree, samplings[s], position=positions[s], history=histories[s]
        ).tokens
        found = got.token[s, : int(got.count[s])].tolist()
        if found != list(want):
            yield f"edits session {s}: {found}, want {want}"


def check_accept(device: str, samplings: list[Sampling], vocab: int, nodes: int) -> Iterator[str]:
    """accept_rows against accept.accept, sparse and dense, both rules."""
    rng = np.random.default_rng(2)
    logits, _, positions = a_round(samplings, vocab, nodes, torch.float32, 3)
    for dense in (False, True):
        tokens: list[list[int]] = []
        drafts = []
        for s, sampling in enumerate(samplings):
            laws = []
            for row in logits[s][:nodes]:
                law = np.exp(normalise(target_scores(row, sampling, position=0)).astype(np.float64))
                law = law**0.9 * np.exp(0.3 * rng.standard_normal(vocab))
                if not dense:
                    law[np.argsort(law)[:-8]] = 0
                laws.append(law / law.sum())
            tokens.append([int(rng.choice(vocab, p=law)) for law in laws])
            if dense:
                drafts.append(DraftProbs.dense(torch.from_numpy(np.array(laws))))
            else:
                ids = np.argsort(np.array(laws), axis=1)[:, -8:].copy()
                probs = np.take_along_axis(np.array(laws), ids, 1)
                drafts.append(DraftProbs.sparse(torch.from_numpy(ids), torch.from_numpy(probs)))
        packed = rounds.round_trees([TokenTree.chain(t) for t in tokens], device)
        params = rounds.row_params(samplings, positions, packed.owner, packed.depth)
        draft = rounds.draft_rows(drafts, packed, vocab)
        for rule in Rule:
            got = accept_rows(torch.cat(logits).to(device), packed, draft, params, rule)
            for s, sampling in enumerate(samplings):
                want = accept(
                    logits[s], tokens[s], drafts[s], sampling, rule=rule, position=positions[s]
                ).tokens
                found = got.token[s, : int(got.count[s])].tolist()
                if found != list(want):
                    yield f"{rule} dense={dense} session {s}: {found}, want {want}"


def check_noise_and_packing(device: str, vocab: int) -> Iterator[str]:
    """Noise of scattered tokens, and the order of packed rows."""
    seeds, positions = [5, 2**63 + 1], [9, 2**40]
    signed = torch.tensor([5, 2**63 + 1 - 2**64], device=device)
    ids = torch.randint(0, vocab, (2, 100), generator=torch.Generator().manual_seed(1))
    got = noise_triton.gumbel_at(
        signed, torch.tensor(positions, device=device), ids.to(device), noise.TARGET
    )
    want = noise.gumbel_rows(seeds, positions, ids)
    if not torch.allclose(got.cpu(), want, rtol=2e-6, atol=2e-6):
        yield f"noise differs by {float((got.cpu() - want).abs().max())}"
    logits = torch.randn(2, vocab, generator=torch.Generator().manual_seed(2)) * 4
    owner = torch.tensor([0, 1], dtype=torch.int32, device=device)
    samplings = [Sampling(seed=seed, temperature=0.8) for seed in seeds]
    params = rounds.row_params(samplings, positions, owner, owner * 0)
    packed = sparse_triton.pack_rows(logits.to(device), params, 16, noise.TARGET)
    for row, sampling in enumerate(samplings):
        scores = logits[row] / sampling.temperature
        kept = scores.topk(16).indices
        values = scores[kept] + noise.gumbel_at(seeds[row], positions[row], kept)
        order = kept[values.argsort(descending=True)]
        if packed.ids[row].tolist() != order.tolist():
            yield f"packing row {row}: {packed.ids[row].tolist()}, want {order.tolist()}"


def check_attention(device: str, sizes: Sizes) -> Iterator[str]:
    """Against fp32 on the host, and the bits of a row alone, in a batch, in a tree and when
    split."""
    torch.manual_seed(3)
    # Two keys short of a block's end, so that a path of five rows crosses it.
    block, page = attention.KEY_BLOCK, sizes.page
    base = sizes.keys // block * block + block - 2
    tree, on_path = (-1, 0, 0, 2, 2, 1, 3, 4, 6, 6), [0, 2, 3, 6, 9]
    pages_each = -(-(base + 16) // page)
    tables = torch.randperm(3 * pages_each).view(3, -1).int()
    shape = (3 * pages_each * page, sizes.kv_heads, sizes.head_dim)
    keys, values = torch.randn(2, *shape).to(sizes.dtype)
    query = torch.randn(len(on_path), sizes.heads, sizes.head_dim).to(sizes.dtype)

    def slots(positions: list[int]) -> torch.Tensor:
        where = torch.tensor(positions)
        return tables[0].long()[where // page] * page + where % page

    own = slots([base + i for i in range(len(on_path))])
    own_keys, own_values = keys[own].clone(), values[own].clone()

    def run(
        rows: torch.Tensor,
        plan_rows: list[int | tuple[int, ...]],
        bases: list[int],
        which: list[int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        planned = attention.plan(tables[which].to(device), bases, plan_rows, page)
        inputs = (rows.to(device), keys.to(device), values.to(device), planned)
        whole = attention_triton.attend(*inputs, sizes.head_dim**-0.5, whole=True)
        split = attention_triton.attend(*inputs, sizes.head_dim**-0.5, whole=False)
        return whole.cpu(), split.cpu()

    chain, split = run(query, [len(on_path)], [base], [0])
    if not torch.equal(chain, split):
        yield "attention: split and whole differ"
    planned = attention.plan(tables[:1], [base], [len(on_path)], page)
    want = attention_cpu.attend(
        query.float(), keys.float(), values.float(), planned, sizes.head_dim**-0.5
    )
    error = float((chain.float() - want).abs().max())
    if not error < 2e-2:
        yield f"attention: off by {error}"
    for i in range(len(on_path)):
        alone, _ = run(query[i : i + 1], [1], [base + i], [0])
        if not torch.equal(alone[0], chain[i]):
            yield f"attention: row {i} alone has other bits"
    mixed = torch.randn(6 + len(on_path), sizes.heads, sizes.head_dim).to(sizes.dtype)
    mixed[2 : 2 + len(on_path)] = query
    batch, _ = run(mixed, [2, len(on_path), 4], [20, base, 3], [1, 0, 2])
    if not torch.equal(batch[2 : 2 + len(on_path)], chain):
        yield "attention: in a batch the bits are others"
    at = slots([base + row for row in on_path])
    keys[at], values[at] = own_keys, own_values
    wide = torch.randn(len(tree), sizes.heads, sizes.head_dim).to(sizes.dtype)
    wide[on_path] = query
    for branched in run(wide, [tree], [base], [0]):
        if not torch.equal(branched[on_path], chain):
            yield "attention: in a tree the bits are others"


def check_pages(device: str, sizes: Sizes) -> Iterator[str]:
    """Writes and compaction against plain indexing."""
    torch.manual_seed(4)
    rows = attention.row_parents([-1, -1, 0, 1, 2, 3])
    tables = torch.randperm(8).view(2, 4).int()
    shape = (2, 8 * sizes.page, sizes.kv_heads, sizes.head_dim)
    pools = torch.randn(shape).to(sizes.dtype)
    fresh = torch.randn(2 * len(rows), *shape[2:]).to(sizes.dtype)
    fresh[3, 0, 0] = torch.inf
    path = torch.tensor([[1, 3, 5], [0, 2, -1]], dtype=torch.int32)
    results = []
    for where, write, compact in (
        ("cpu", pages.write_rows, pages.compact_path),
        (device, pages_triton.write_rows, pages_triton.compact_path),
    ):
        planned = attention.plan(tables.to(where), [5, sizes.page - 2], [rows, rows], sizes.page)
        mine = pools.clone().to(where)
        write(fresh.to(where), fresh.to(where), mine[0], mine[1], planned.slots)
        compact(mine, planned, path.to(where))
        results.append(mine.cpu())
    if not torch.equal(results[0].nan_to_num(7.0), results[1].nan_to_num(7.0)):
        yield "pages: pools differ"


def failures(device: str, sizes: Sizes) -> list[str]:
    """Every disagreement with a reference."""
    # Interpreted, a row of a session takes a second.
    samplings, nodes = (SAMPLINGS, 7) if device == "cuda" else (SAMPLINGS[:3:2], 1)
    vocab = sizes.vocab
    found: list[str] = []
    for check in (
        check_noise_and_packing(device, vocab),
        check_follow(device, samplings, vocab, nodes),
        check_edits(device, vocab, nodes),
        check_accept(device, samplings, min(vocab, 20_000), nodes),
        check_attention(device, sizes),
        check_pages(device, sizes),
    ):
        found += check
    return found
