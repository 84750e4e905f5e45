"""One generation's state on the verifier: tokens, pages, proposal.

Knows: what a request asked for, what is committed, and when it ends. Pure: no gRPC, no model, no
clock of its own.

`tokens` is the only truth. Positions below `computed` have KV; the last token is the anchor. A
session whose `computed` is len(tokens) - 1 stands at its anchor and may verify a proposal; one
further behind is prefilling (a fresh prompt, or recomputing after preemption: the arithmetic gives
the same bits either way).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from draftwire.v1 import types_pb2, verifier_pb2
from draftwire_kernels.sampling import History, Sampling
from draftwire_kernels.tree import TokenTree
from verifier_service.stats import Statistics
from verifier_service.text import Decoder, TextStream

if TYPE_CHECKING:
    from verifier_service.metrics import RoundWatch

FinishReason = verifier_pb2.FinishReason
BlockSizeReason = types_pb2.BlockSizeReason


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation in force for a request; `mode` is a SpeculationMode."""

    enabled: bool
    max_block_size: int
    max_nodes: int
    parts: tuple[int, ...] = ()
    mode: int = types_pb2.SPECULATION_MODE_FIXED

    @property
    def adaptive(self) -> bool:
        """Whether the length may be changed from round to round."""
        return self.mode == types_pb2.SPECULATION_MODE_ADAPTIVE


@dataclass(frozen=True, slots=True)
class Request:
    """An admitted request: every default filled in, every value checked."""

    request_id: str
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int
    speculation: Speculation
    eos_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    skip_special_tokens: bool = True
    priority: int = 0
    deadline: float | None = None  # seconds, on the engine's clock
    arrival: float = 0.0
    traceparent: str = ""  # W3C trace context, for the drafter
    watch: RoundWatch | None = None  # hears of each round


@dataclass(slots=True)
class Proposal:
    """A checked proposal waiting to be verified. `log_probs`: what the drafter claims of each node,
    empty if nothing. `whole`: what it was cut from. `asked_depth`: longest path asked for."""

    base: int
    tree: TokenTree
    parts: tuple[int, ...]
    block_size: int
    reason: int
    log_probs: tuple[float, ...] = ()
    asked_depth: int = 0
    whole: Proposal | None = None

    def depths(self) -> list[int]:
        """Depth of each node, 0 for children of the anchor."""
        return [depth - 1 for depth in self.tree.depths()]

    def cut(self, nodes: int) -> Proposal:
        """The first `nodes` nodes: parents come before their children, so any prefix is a tree."""
        return self.kept(range(nodes), BlockSizeReason.BLOCK_SIZE_REASON_LOAD)

    def kept(self, nodes: Sequence[int] | np.ndarray, reason: int) -> Proposal:
        """These nodes only: ascending, at least one, each with its parent."""
        keep = [int(node) for node in nodes]
        if len(keep) == len(self.tree):
            return self
        place = {node: index for index, node in enumerate(keep)} | {-1: -1}
        tree = TokenTree(
            tuple(self.tree.tokens[node] for node in keep),
            tuple(place[self.tree.parents[node]] for node in keep),
        )
        return Proposal(
            self.base,
            tree,
            tuple(self.parts[node] for node in keep) if self.parts else (),
            min(self.block_size, max(tree.depths()) + 1),
            reason,
            tuple(self.log_probs[node] for node in keep) if self.log_probs else (),
            self.asked_depth,
            self.whole or self,
        )

    def pruned(self, depth: int) -> Proposal | None:
        """Without nodes deeper than `depth` tokens; None if none is left."""
        keep = [node for node, at in enumerate(self.depths()) if at < depth]
        if not keep:
            return None
        pruned = self.kept(keep, BlockSizeReason.BLOCK_SIZE_REASON_MAX_TOKENS)
        if pruned is not self:
            # What may not be verified is no part of what could have been.
            pruned.whole, pruned.block_size = None, min(self.block_size, depth + 1)
        return pruned


@dataclass(frozen=True, slots=True)
class Delta:
    """What a round gives the client."""

    text: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why a session ended."""

    reason: int
    matched: str = ""


class Session:
    """A generation in progress."""

    def __init__(
        self, session_id: int, request: Request, vocab_size: int, tokenizer: Decoder
    ) -> None:
        self.session_id = session_id
        self.request = request
        self.tokens: list[int] = list(request.prompt)
        self.computed = 0
        self.cached_tokens = 0
        self.pages: list[int] = []
        self.slots = np.empty(0, dtype=np.int64)
        self.history: History | None = None
        if request.sampling.needs_history:
            self.history = History(vocab_size, request.prompt)
        self.text = TextStream(
            tokenizer, request.stop_strings, skip_special_tokens=request.skip_special_tokens
        )
        self.ending: Ending | None = None
        self.proposal: Proposal | None = None
        self.why_plain: int = BlockSizeReason.BLOCK_SIZE_REASON_NO_DRAFTER  # if the next round is
        self.captured: frozenset[int] | None = (
            None  # feature layers kept for every computed position; None: none computed
        )
        self.last_logits: torch.Tensor | None = (
            None  # of the last prompt position, if a drafter wants them
        )
        self.stats = Statistics()
        self.started_at: float | None = None
        self.first_token_at: float | None = None
        self.last_token_at: float | None = None
        self.draft_wait = 0.0

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt)

    @property
    def made(self) -> int:
        """Tokens made so far."""
        return len(self.tokens) - self.prompt_length

    @property
    def base(self) -> int:
        """Position of the anchor."""
        return len(self.tokens) - 1

    @property
    def at_anchor(self) -> bool:
        """Whether everything before the anchor has KV and the first token has been made."""
        return self.computed == self.base and self.made > 0

    def drafts_allowed(self, max_context: int) -> int:
        """Longest path that may be verified now: the round commits one token more than it
        accepts."""
        room = min(self.request.max_tokens - self.made, max_context - len(self.tokens))
        return max(0, min(room - 1, self.request.speculation.max_block_size - 1))

    def limit_reason(self, max_context: int) -> int:
        """What it is that leaves no room for drafts, when `drafts_allowed` is 0."""
        speculation = self.request.speculation
        if not speculation.enabled or speculation.max_block_size < 2:
            return BlockSizeReason.BLOCK_SIZE_REASON_OFF
        if self.request.max_tokens - self.made <= max_context - len(self.tokens):
            return BlockSizeReason.BLOCK_SIZE_REASON_MAX_TOKENS
        return BlockSizeReason.BLOCK_SIZE_REASON_CONTEXT

    def commit(self, tokens: Sequence[int], max_context: int) -> Delta:
        """Take committed tokens in order until one ends the answer; `ending` says whether one did.

        The checks of one token come in this order: end of sequence, stop token, stop string,
        max_tokens, context. A token that ends the answer by its id is counted and has no text.
        """
        text: list[str] = []
        taken = 0
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            if self.history is not None:
                self.history.append(token)
            if not self._ends_by_id(token):
                text.append(self.text.push(token))
                self._ends_by_text_or_length(max_context)
            if self.ending is not None:
                text.append(self.text.finish())
                if (
                    self.text.matched is not None
                    and self.ending.reason != FinishReason.FINISH_REASON_STOP_STRING
                ):
                    # Characters that were held back completed a stop string at the very end.
                    self.ending = Ending(FinishReason.FINISH_REASON_STOP_STRING, self.text.matched)
                break
        return Delta("".join(text), tuple(tokens[:taken]))

    def _ends_by_id(self, token: int) -> bool:
        if token in self.request.eos_ids:
            self.ending = Ending(FinishReason.FINISH_REASON_EOS)
        elif token in self.request.stop_token_ids:
            self.ending = Ending(FinishReason.FINISH_REASON_STOP_TOKEN, str(token))
        return self.ending is not None

    def _ends_by_text_or_length(self, max_context: int) -> None:
        if self.text.matched is not None:
            self.ending = Ending(FinishReason.FINISH_REASON_STOP_STRING, self.text.matched)
        elif self.made >= self.request.max_tokens:
            self.ending = Ending(FinishReason.FINISH_REASON_MAX_TOKENS)
        elif len(self.tokens) >= max_context:
            self.ending = Ending(FinishReason.FINISH_REASON_CONTEXT)

    def count_round(self, proposal: Proposal | None, path: Sequence[int], emitted: int) -> None:
        """Book a round: `path` are the accepted nodes, `emitted` how many of the round's tokens the
        answer took."""
        stats = self.stats
        if proposal is None:
            stats.plain_rounds += 1
            off = not self.request.speculation.enabled
            stats.block_sizes[
                1, BlockSizeReason.BLOCK_SIZE_REASON_OFF if off else self.why_plain
            ] += 1
            return
        depths = proposal.depths()
        stats.rounds += 1
        stats.drafted += len(depths)
        stats.block_sizes[proposal.block_size, proposal.reason] += 1
        for depth in set(depths):
            stats.drafted_at[depth] += 1
        kept = path[:emitted]
        stats.accepted += len(kept)
        stats.discarded += len(path) - len(kept)
        stats.accepted_at.update(range(len(kept)))
        stats.drafted_parts.update(proposal.parts)
        stats.accepted_parts.update(proposal.parts[node] for node in kept if proposal.parts)
