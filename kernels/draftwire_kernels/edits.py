"""Which logits of a round are edited before anything is drawn: bias, penalties, banned ids.

Knows Sampling, History and trees; makes one sparse table a session on the host. What a row changes
of it (its own path counts as output, its position may lift a ban) is worked out on the device, by
edits_triton. Knows no kernel.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from draftwire_kernels.sampling import History, Sampling, SamplingError
from draftwire_kernels.tree import TokenTree


def edits_logits(sampling: Sampling) -> bool:
    """Whether some row of such a session has a logit changed before the temperature."""
    banned = sampling.banned.size > 0 and sampling.banned_before > 0
    return banned or sampling.needs_history or sampling.bias_ids.size > 0


@dataclasses.dataclass(frozen=True)
class RoundEdits:
    """The tables of a round's sessions, one after the other; tensors on the device of the logits.

    Each token stands once in a session's table, so that no two edits meet.
    """

    start: torch.Tensor
    """[sessions + 1] int32: session s has entries start[s] .. start[s + 1] - 1."""
    token: torch.Tensor
    """[entries] int32."""
    flags: torch.Tensor
    """[entries] int32: 1 seen in prompt or output, 2 banned below banned_before."""
    bias: torch.Tensor
    """[entries] fp32, added first."""
    count: torch.Tensor
    """[entries] fp32: times in the output before this round."""
    penalties: torch.Tensor
    """[3, sessions] fp32: repetition, frequency, presence."""
    banned_before: torch.Tensor
    """[sessions] int64: absolute position."""
    longest: int
    """Most entries of a session, or a bound on it."""


def round_edits(
    samplings: Sequence[Sampling],
    histories: Sequence[History | None],
    trees: Sequence[TokenTree],
    vocab_size: int,
    device: torch.device | str,
) -> RoundEdits:
    """Pack the edits of a round's sessions, in three copies to the device.

    Raises SamplingError for a missing history or ids outside the vocabulary.
    """
    tables = [
        _table(sampling, history, tree, vocab_size)
        for sampling, history, tree in zip(samplings, histories, trees, strict=True)
    ]
    sizes = [table[0].size for table in tables]
    whole = np.concatenate(
        [
            np.cumsum([0, *sizes]),
            *(table[0] for table in tables),
            *(table[1] for table in tables),
        ]
    ).astype(np.int32)
    reals = np.concatenate(
        [
            *(table[2] for table in tables),
            *(table[3] for table in tables),
            [s.repetition_penalty for s in samplings],
            [s.frequency_penalty for s in samplings],
            [s.presence_penalty for s in samplings],
        ]
    ).astype(np.float32)
    count, entries = len(tables), sum(sizes)
    ints = torch.from_numpy(whole).to(device, non_blocking=True)
    floats = torch.from_numpy(reals).to(device, non_blocking=True)
    before = torch.tensor([s.banned_before for s in samplings], dtype=torch.int64)
    return RoundEdits(
        start=ints[: count + 1],
        token=ints[count + 1 : count + 1 + entries],
        flags=ints[count + 1 + entries :],
        bias=floats[:entries],
        count=floats[entries : 2 * entries],
        penalties=floats[2 * entries :].view(3, count),
        banned_before=before.to(device, non_blocking=True),
        longest=max(sizes, default=0),
    )


def _table(
    sampling: Sampling, history: History | None, tree: TokenTree, vocab_size: int
) -> tuple[
    npt.NDArray[np.int64], npt.NDArray[np.int32], npt.NDArray[np.float32], npt.NDArray[np.float32]
]:
    """Tokens, flags, bias and counts of a session. Tokens of its tree are among them: a row counts
    those of its own path."""
    sampling.check_vocabulary(vocab_size)
    seen: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
    path, counts = seen, np.empty(0, dtype=np.float32)
    if sampling.needs_history:
        if history is None:
            raise SamplingError("history", "given when a penalty is on", None)
        seen, counts = history.table()
        path = np.asarray(tree.tokens, dtype=np.int64)
    tokens = np.unique(np.concatenate([seen, path, sampling.bias_ids, sampling.banned]))
    flags = np.zeros(tokens.size, dtype=np.int32)
    bias = np.zeros(tokens.size, dtype=np.float32)
    count = np.zeros(tokens.size, dtype=np.float32)
    at = np.searchsorted(tokens, seen)
    flags[at] |= 1
    count[at] = counts
    flags[np.searchsorted(tokens, sampling.banned)] |= 2
    bias[np.searchsorted(tokens, sampling.bias_ids)] = sampling.bias_values
    return tokens, flags, bias, count
