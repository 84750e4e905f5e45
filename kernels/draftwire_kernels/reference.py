"""The specification: target distribution, acceptance rules and noise, in any float type.

Knows nothing of speed; every fast path is tested against this file. A rule is given target_probs of
every row it needs and says the *law* of what is committed, so that tests can enumerate it.

Terms
-----
target_probs  the distribution the target's next token is drawn from, after every sampling
              parameter: [V], sums to one. The same function in plain decoding, acceptance,
              residual, bonus and logprobs.
draft_probs   the distribution a drafted token was really sampled from: [V], sums to one; one-hot
              for a drafter that does not sample.
anchor        the last committed token; row 0 of target_rows is the distribution after it.
drafted       tokens x_1 .. x_n below the anchor; row i of target_rows is the distribution after
              x_i, row i - 1 of draft_rows the one that x_i was sampled from.
accepted      the drafted tokens that are kept: a prefix of the chain, a path of the tree.
recovered     the token drawn where the accepted prefix ends early.
bonus         the token drawn after a chain, or below a leaf, that is accepted to its end.
committed     the accepted tokens and then the recovered or bonus token.
outcome       an accepted path, its probability given what was drafted, and the law of the token
              after it.

Every rule is exact: over drafts, coins and the token after, committed tokens are distributed as
the target's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwire_kernels.sampling import Sampling
from draftwire_kernels.tree import TokenTree

Tensor = torch.Tensor


# --- target_probs ---------------------------------------------------------------------------------


def target_probs(
    logits: Tensor,
    sampling: Sampling,
    *,
    position: int,
    prompt_ids: Sequence[int] = (),
    output_ids: Sequence[int] = (),
    allowed: Tensor | None = None,
) -> Tensor:
    """Distribution of the token at `position`, [V] in the type of logits [V].

    output_ids: the output so far, the drafted path included. allowed: bool [V].
    """
    scores = adjusted(logits, sampling, position, prompt_ids, output_ids, allowed)
    if sampling.greedy:
        greedy = torch.zeros_like(scores)
        greedy[_order(scores)[0]] = 1
        return greedy
    scores = scores / sampling.temperature
    scores = top_k(scores, sampling.top_k)
    scores = top_p(scores, sampling.top_p)
    scores = min_p(scores, sampling.min_p)
    return torch.softmax(scores, 0)


def adjusted(
    logits: Tensor,
    sampling: Sampling,
    position: int,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    allowed: Tensor | None,
) -> Tensor:
    """Logits after bias, repetition, frequency, presence penalty, banned ids, mask, in order."""
    scores = logits.clone()
    for token, value in sampling.logit_bias:
        scores[token] += value
    for token in {*prompt_ids, *output_ids}:
        penalty = sampling.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output_ids):
        scores[token] -= sampling.frequency_penalty * list(output_ids).count(token)
        scores[token] -= sampling.presence_penalty
    if position < sampling.banned_before:
        scores[list(sampling.banned_ids)] = -math.inf
    if allowed is not None:
        scores[~allowed] = -math.inf
    return scores


def top_k(scores: Tensor, k: int) -> Tensor:
    """Exclude all but the k largest scores, the lower ids among equals; 0 is off."""
    return scores if k == 0 else _keep(scores, _order(scores)[:k])


def top_p(scores: Tensor, p: float) -> Tensor:
    """Exclude all but the shortest prefix, by score and then id, that reaches p; 1 is off."""
    if p == 1:
        return scores
    order = _order(scores)
    before = torch.cumsum(torch.softmax(scores, 0)[order], 0) - torch.softmax(scores, 0)[order]
    return _keep(scores, order[before < p])


def min_p(scores: Tensor, share: float) -> Tensor:
    """Exclude tokens less likely than `share` times the most likely one; 0 is off."""
    return scores if share == 0 else _keep(scores, scores >= scores.max() + math.log(share))


def _order(scores: Tensor) -> Tensor:
    return torch.sort(scores, descending=True, stable=True).indices


def _keep(scores: Tensor, which: Tensor) -> Tensor:
    kept = torch.full_like(scores, -math.inf)
    kept[which] = scores[which]
    return kept


# --- Acceptance rules
# ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """One thing that may happen in a round."""

    path: tuple[int, ...]
    """Accepted nodes."""
    probability: float
    """Given what was drafted."""
    next_probs: Tensor
    """Law of the recovered or bonus token, [V]."""


def follow(target_rows: Tensor, tree: TokenTree) -> list[Outcome]:
    """Draw a token at each node, walk to the child that bears it. target_rows [n + 1, V]."""
    outcomes = []
    reach = {-1: 1.0}
    for node in range(-1, len(tree)):
        probs = target_rows[node + 1].clone()
        for child in tree.children(node):
            # Of two siblings with the same token the first is walked: the second finds its
            # probability gone.
            reach[child] = reach[node] * float(probs[tree.tokens[child]])
            probs[tree.tokens[child]] = 0
        stays = float(probs.sum())
        if stays > 0:
            outcomes.append(Outcome(tree.path(node), reach[node] * stays, probs / stays))
    return outcomes


def chain(target_rows: Tensor, tokens: Sequence[int], draft_rows: Tensor) -> list[Outcome]:
    """Accept x_i with min(1, target / draft); at the first refusal draw from the residual."""
    outcomes, reach = [], 1.0
    for i, token in enumerate(tokens):
        target, draft = target_rows[i], draft_rows[i]
        accept = min(1.0, float(target[token] / draft[token]))
        if accept < 1:
            outcomes.append(Outcome(tuple(range(i)), reach * (1 - accept), residual(target, draft)))
        reach *= accept
    outcomes.append(Outcome(tuple(range(len(tokens))), reach, target_rows[len(tokens)]))
    return outcomes


def block(target_rows: Tensor, tokens: Sequence[int], draft_rows: Tensor) -> list[Outcome]:
    """Block verification (Sun et al. 2025): accept the longest prefix whose own coin succeeds.

    P_0 = 1, P_i = min(1, P_{i-1} target(x_i) / draft(x_i)): how far the block so far outruns the
    target.
    """
    n = len(tokens)
    joint = [1.0]
    for i, token in enumerate(tokens):
        joint.append(min(1.0, joint[i] * float(target_rows[i][token] / draft_rows[i][token])))
    outcomes, later_fail = [], 1.0
    for i in range(n, -1, -1):
        if i == n:
            coin, next_probs = joint[n], target_rows[n]
        else:
            spare = float((joint[i] * target_rows[i] - draft_rows[i]).clamp(min=0).sum())
            # The empty prefix needs no coin, and where nothing can be spare a longer prefix was
            # accepted.
            coin = 1.0 if joint[i] == 1 else spare / (spare + 1 - joint[i])
            next_probs = residual(target_rows[i], draft_rows[i], joint[i])
        if later_fail * coin > 0:
            outcomes.append(Outcome(tuple(range(i)), later_fail * coin, next_probs))
        later_fail *= 1 - coin
    return outcomes


def residual(target: Tensor, draft: Tensor, weight: float = 1.0) -> Tensor:
    """Law of the recovered token: (weight target - draft)+ normalised; target if nothing is left.

    In log space: with draft close to target the plain difference cancels, log1p does not.
    """
    log_target = target.log() + (math.log(weight) if weight > 0 else -math.inf)
    ratio = torch.where(draft > 0, draft.log() - log_target, torch.full_like(target, -math.inf))
    above = ratio < 0
    left = torch.where(above, log_target + torch.log1p(-ratio.clamp(max=0).exp()), -math.inf)
    if not bool((left > -math.inf).any()):
        return target
    return torch.softmax(left, 0)  # normalises: left are log weights, not probabilities


# --- Branch mixture: draft_probs of a drafter that draws one of K fixed branches
# -------------------------------------


def tempered(prior: Tensor, temperature: float) -> Tensor:
    """The prior over branches as sampled: flattened by the category temperature, [K]."""
    return torch.softmax(prior.log() / temperature, 0)


def mixture_rows(
    branches: Sequence[Sequence[int]], prior: Tensor, tokens: Sequence[int], vocab_size: int
) -> Tensor:
    """draft_rows [n, V] of `tokens`, one of K equally long branches drawn with `prior` [K].

    Row i gives each branch that agrees with x_1 .. x_i its weight, renormalised (the running
    weights).
    """
    rows = torch.zeros(len(tokens), vocab_size, dtype=prior.dtype)
    for i in range(len(tokens)):
        for branch, weight in zip(branches, prior, strict=True):
            if list(branch[:i]) == list(tokens[:i]):
                rows[i, branch[i]] += weight
        rows[i] /= rows[i].sum()
    return rows


# --- Noise: `noise`, a number at a time
# ------------------------------------------------------------------------------


def philox(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """One block of Philox4x64-10 in Python integers."""
    mask = 2**64 - 1
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = (b >> 64) ^ c1 ^ k0, b & mask, (a >> 64) ^ c3 ^ k1, a & mask
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & mask, (k1 + 0xBB67AE8584CAA73B) & mask
    return c0, c1, c2, c3


def gumbel(seed: int, position: int, token: int, purpose: int = 0, base: int = 0) -> float:
    """Gumbel noise of one token, in fp64 from the generator's bits on."""
    group = token // 64
    word = philox((group // 4 + 1, position, 0, base), (seed, purpose))[group % 4]
    smallest = _exponential(word % 2**58, 58) / 64
    if word >> 58 == token % 64:
        return -math.log(smallest)
    block = philox((token // 8 + 1, position, 1, base), (seed, purpose))
    half = block[token % 8 // 2] >> (32 * (token % 2)) & (2**32 - 1)
    return -math.log(smallest + _exponential(half, 32))


def _exponential(bits: int, width: int) -> float:
    return -math.log1p(-min((bits + 0.5) / 2**width, 1 - 2**-24))
