"""What a block is trained for: label and distribution losses, position weights, branch mixtures and
accepted length.

Pure functions of log-probabilities, all in float32. `mask` says which slots have a label; slots
without one count for nothing. Every loss returns a SUM over blocks; who calls divides, so that
gradients of pieces and ranks add up exactly. Does not know networks or batches.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


def decay_weights(slots: int, gamma: float, device: torch.device | None = None) -> torch.Tensor:
    """float32 [slots]: exp(-(k - 1) / gamma) for slot k = 1 .. slots."""
    return torch.exp(-torch.arange(slots, dtype=torch.float32, device=device) / gamma)


def dpace_weights(label_logprobs: torch.Tensor, mask: torch.Tensor, alpha: float) -> torch.Tensor:
    """D-PACE weights [blocks, slots], detached, of label log-probabilities of that shape.

    With s_j = (1 - alpha) q_j + alpha and P_i = s_1 .. s_i the weight of slot i is the sum of P_k
    over k >= i: how much accepted length hangs on that slot.
    """
    chance = label_logprobs.detach().float().exp()
    smoothed = ((1 - alpha) * chance + alpha) * mask
    reached = torch.cumprod(smoothed, dim=1)
    return reached.flip(1).cumsum(1).flip(1) * mask


def weighted(losses: torch.Tensor, weights: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Sum of losses times weights over slots with a label. All [blocks, slots]."""
    return (torch.where(mask, losses, 0.0) * weights).sum()


def distribution_loss(
    logprobs: torch.Tensor, top_columns: torch.Tensor, top_logprobs: torch.Tensor
) -> torch.Tensor:
    """KL of the draft to the target's kept tokens, for each row: float32 [rows].

    logprobs [rows, columns] of the draft; top_columns int64 [rows, top]: the column of each of the
    target's likeliest tokens, -1 where the draft has no such column; top_logprobs [rows, top]. The
    target's distribution is renormalised over the tokens that have a column; a row without any
    gives 0.
    """
    known = top_columns >= 0
    target = top_logprobs.float().masked_fill(~known, float("-inf"))
    some = known.any(dim=-1)
    total = torch.logsumexp(target, dim=-1, keepdim=True)
    target = torch.where(known & some[:, None], target - total, 0.0)
    share = torch.where(known & some[:, None], target.exp(), 0.0)
    draft = logprobs.gather(1, top_columns.clamp(min=0))
    return (share * (target - draft)).sum(dim=-1)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Log-probabilities of a block under K branches.

    log_prior float32 [blocks, K]; branch_logprobs float32 [blocks, K, slots]: of the label of each
    slot under each branch. `mask` bool [blocks, slots].
    """

    log_prior: torch.Tensor
    branch_logprobs: torch.Tensor
    mask: torch.Tensor

    def prefixes(self) -> torch.Tensor:
        """log q_dep(x_1 .. x_i) for each i: float32 [blocks, slots]; constant past the labels."""
        slots = torch.where(self.mask[:, None], self.branch_logprobs.float(), 0.0)
        reached = slots.cumsum(dim=2) + self.log_prior.float()[:, :, None]
        return torch.logsumexp(reached, dim=1)

    def conditionals(self) -> torch.Tensor:
        """log q_dep(x_i | x_1 .. x_i-1): float32 [blocks, slots]; 0 past the labels."""
        prefixes = self.prefixes()
        before = torch.cat([torch.zeros_like(prefixes[:, :1]), prefixes[:, :-1]], dim=1)
        return torch.where(self.mask, prefixes - before, 0.0)

    def responsibilities(self) -> torch.Tensor:
        """Posterior of the branch given the whole block: float32 [blocks, K]."""
        slots = torch.where(self.mask[:, None], self.branch_logprobs.float(), 0.0)
        return torch.softmax(self.log_prior.float() + slots.sum(dim=2), dim=1)

    def nll(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Sum over blocks of -log q_dep of the block, or of its conditionals times `weights`."""
        conditionals = self.conditionals()
        scale = torch.ones_like(conditionals) if weights is None else weights
        return -weighted(conditionals, scale, self.mask)


def accepted_length_loss(
    draft_logprobs: torch.Tensor,
    target_logprobs: torch.Tensor,
    mask: torch.Tensor,
    *,
    tau: float = 0.1,
    detach_acceptance: bool = False,
) -> torch.Tensor:
    """Log-domain surrogate of the expected accepted length, cut where draft and target part.

    draft_logprobs, target_logprobs [blocks, slots]: conditionals of the labels, drawn from the
    target. With r_i = q(x_1..i) / p(x_1..i), A_i = product of min(1, p_j / q_j) and
    l_i = A_1 + .. + A_i, the loss of a block is -sum over retained i of (log r_i + log l_i), i
    retained where r_i > tau; i = 1 always is, else a block far from the target would teach nothing.
    """
    ratio = torch.where(mask, draft_logprobs.float() - target_logprobs.float(), 0.0)
    log_r = ratio.cumsum(dim=1)
    log_a = ratio.clamp(min=0).neg().cumsum(dim=1)
    if detach_acceptance:
        log_a = log_a.detach()
    # Past the labels nothing may be added to the length either.
    log_l = torch.logcumsumexp(log_a.masked_fill(~mask, float("-inf")), dim=1)
    retained = (log_r.detach() > torch.log(torch.tensor(tau))) & mask
    retained[:, 0] = mask[:, 0]
    return -torch.where(retained, log_r + torch.where(mask, log_l, 0.0), 0.0).sum()


def chain_loss(draft_logprobs: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Minus the expected run of labels that a sampled draft hits: -sum over k of q_1 .. q_k."""
    reached = torch.where(mask, draft_logprobs.float(), 0.0).cumsum(dim=1).exp()
    return -(reached * mask).sum()


def balance_loss(responsibilities: torch.Tensor) -> torch.Tensor:
    """KL of the mean branch usage to uniform, >= 0; what keeps a branch from dying."""
    usage = responsibilities.float().mean(dim=0).clamp(min=1e-9)
    return (usage * usage.log()).sum() + torch.log(torch.tensor(float(usage.numel())))


@dataclass(frozen=True, slots=True)
class BranchUse:
    """How alive the branches are: entropies in nats, and branches with less than 2 % of use."""

    prior_entropy: float
    usage_entropy: float
    dead: int


def branch_use(mixture: Mixture) -> BranchUse:
    """Monitors of collapse over one batch."""
    with torch.no_grad():
        prior = mixture.log_prior.float()
        usage = mixture.responsibilities().mean(dim=0)
        entropy = -(prior.exp() * prior).sum(dim=1).mean()
        spread = -(usage * usage.clamp(min=1e-9).log()).sum()
    return BranchUse(float(entropy), float(spread), int((usage < 0.02).sum()))
