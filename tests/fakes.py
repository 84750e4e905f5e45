"""Small real parts for tests: a tiny target with random weights, a drafter service that proposes
what a test tells it to, and the pair started in this process over real gRPC.

Nothing here stands in for gRPC or for the engine: the services are the shipped ones; only the
weights are small.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import torch

from draftwire.channel import ChannelConfig, open_channel
from draftwire.config import WireConfig
from draftwire.runtime import serve
from draftwire.v1 import drafter_pb2, drafter_pb2_grpc, types_pb2, verifier_pb2, verifier_pb2_grpc
from draftwire_kernels.tree import TokenTree
from verifier_service.config import VerifierConfig
from verifier_service.service import VerifierService

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_target(
    folder: Path,
    *,
    seed: int = 0,
    hidden: int = 48,
    layers: int = 4,
    context: int = 512,
    vocab: int = 0,
) -> Path:
    """A Llama with random weights and a byte-level tokenizer, saved as a Hugging Face folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True) for t in ("<|im_start|>", "<|im_end|>")]
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>"
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab or len(fast),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=hidden // 6,
        max_position_embeddings=context,
        eos_token_id=fast.eos_token_id,
        bos_token_id=fast.bos_token_id,
        tie_word_embeddings=True,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


Propose = Callable[[list[int], "DraftSession"], TokenTree | None]


@dataclass
class DraftSession:
    """What the scripted drafter knows of a session."""

    tokens: list[int]
    prompt_tokens: int
    epoch: int
    feature_rows: int
    budget: drafter_pb2.RoundBudget
    request_id: str


@dataclass
class ScriptedDrafter(drafter_pb2_grpc.DrafterServicer):
    """A real Drafter service whose proposals come from `propose`. Checks the verifier's positions
    as it goes."""

    propose: Propose
    layers: tuple[int, ...] = (1, 2)
    change_reply: Callable[[drafter_pb2.HelloReply], None] = lambda _: None
    before_answer: Callable[[], Any] = lambda: asyncio.sleep(0)
    change_response: Callable[[drafter_pb2.StepResponse], None] = lambda _: None
    sessions: dict[int, DraftSession] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    steps: int = 0
    answers: int = 0
    lanes: int = 0
    opened: int = 0
    ended: int = 0
    closed: int = 0  # lanes that were ended cleanly
    hello: drafter_pb2.Hello | None = None

    async def Draft(
        self, requests: AsyncIterator[drafter_pb2.DraftRequest], context: Any
    ) -> AsyncIterator[drafter_pb2.DraftResponse]:
        mine: set[int] = set()
        self.lanes += 1
        try:
            async for request in requests:
                kind = request.WhichOneof("message")
                if kind == "hello":
                    self.hello = request.hello
                    yield drafter_pb2.DraftResponse(hello=self._reply(request.hello))
                    yield drafter_pb2.DraftResponse(ready=drafter_pb2.LaneReady(lane_id=self.lanes))
                elif kind == "close":
                    self.closed += 1
                elif kind == "step":
                    self.steps += 1
                    ready = self._take(request.step, mine)
                    await self.before_answer()
                    self.answers += 1
                    response = drafter_pb2.StepResponse(
                        sequence=self.answers, ack_sequence=request.step.sequence
                    )
                    for session_id in ready:
                        if (proposal := self._proposal(session_id)) is not None:
                            response.proposals.append(proposal)
                    self.change_response(response)
                    yield drafter_pb2.DraftResponse(step=response)
        finally:
            self.lanes -= 1
            for session_id in mine:
                self.sessions.pop(session_id, None)

    def opening(self, message: drafter_pb2.OpenSession) -> None:
        """A session opens; for drafters that have to do something about it."""

    def _reply(self, hello: drafter_pb2.Hello) -> drafter_pb2.HelloReply:
        reply = drafter_pb2.HelloReply(
            drafter_name="scripted",
            weights_sha256="0" * 64,
            trained=True,
            encoding=drafter_pb2.FEATURE_ENCODING_RAW,
            feature_layers=self.layers,
            feature_size=len(self.layers) * hello.target.hidden_size,
            feature_dtype=types_pb2.ELEMENT_TYPE_FLOAT32,
            min_block_size=1,
            block_size=16,
            max_block_size=64,
            max_context=1 << 20,
            credits=4,
            max_message_bytes=1 << 22,
        )
        self.change_reply(reply)
        return reply

    def _take(self, step: drafter_pb2.StepRequest, mine: set[int]) -> list[int]:
        ready = []
        for end in step.ends:
            self.ended += 1
            mine.discard(end.key.session_id)
            if self.sessions.pop(end.key.session_id, None) is None:
                self.faults.append(f"end of unknown session {end.key.session_id}")
        for o in step.opens:
            self.opened += 1
            self.opening(o)
            mine.add(o.key.session_id)
            self.sessions[o.key.session_id] = DraftSession(
                list(o.token_ids), o.prompt_tokens, o.key.epoch, 0, o.budget, o.request_id
            )
            if len(o.token_ids) != o.key.base_position + 1:
                self.faults.append(
                    f"open with {len(o.token_ids)} tokens at base {o.key.base_position}"
                )
            ready.append(o.key.session_id)
        for f in step.features:
            s = self.sessions[f.key.session_id]
            if f.first_position != s.feature_rows:
                self.faults.append(
                    f"features from {f.first_position}, {s.feature_rows} rows are here"
                )
            s.feature_rows += f.rows.shape[0]
        for o in step.outcomes:
            s = self.sessions.get(o.key.session_id)
            if s is None:
                self.faults.append(f"outcome for unknown session {o.key.session_id}")
                continue
            if o.previous_base != len(s.tokens) - 1 or o.key.epoch != s.epoch:
                self.faults.append(
                    f"outcome from base {o.previous_base}, {len(s.tokens) - 1} is here"
                )
            if o.features.shape[0] != len(o.token_ids):
                self.faults.append(
                    f"{o.features.shape[0]} feature rows for {len(o.token_ids)} tokens"
                )
            s.tokens.extend(o.token_ids)
            s.feature_rows += o.features.shape[0]
            s.budget = o.budget
            ready.append(o.key.session_id)
        return [i for i in dict.fromkeys(ready) if self.sessions[i].budget.want_proposal]

    def _proposal(self, session_id: int) -> drafter_pb2.Proposal | None:
        s = self.sessions[session_id]
        if s.feature_rows != len(s.tokens) - 1:
            self.faults.append(f"{s.feature_rows} feature rows at base {len(s.tokens) - 1}")
        tree = self.propose(s.tokens, s)
        if tree is None:
            return None
        key = types_pb2.SessionKey(
            session_id=session_id, epoch=s.epoch, base_position=len(s.tokens) - 1
        )
        nodes = types_pb2.TokenTree(
            token_ids=tree.tokens, parents=tree.parents, log_probs=[0.0] * len(tree)
        )
        depth = max(tree.depths(), default=0)
        return drafter_pb2.Proposal(
            key=key, tree=nodes, block_size=depth + 1, reason=types_pb2.BLOCK_SIZE_REASON_FIXED
        )


def random_trees(
    vocab_size: int, max_nodes: int, seed: int = 0, truth: Sequence[int] | None = None
) -> Propose:
    """Random trees to `max_nodes` nodes; with `truth` (whole texts) about half of the nodes lie on
    the true path."""
    rng = random.Random(seed)

    def propose(tokens: list[int], session: DraftSession) -> TokenTree:
        count = rng.randint(1, min(max_nodes, session.budget.max_nodes or max_nodes))
        nodes: list[int] = []
        parents: list[int] = []
        depth = {-1: 0}
        tip = -1
        for index in range(count):
            parent = rng.choice([tip, rng.randint(-1, index - 1)])
            if session.budget.max_depth and depth[parent] >= session.budget.max_depth:
                parent = -1
            token = rng.randrange(vocab_size)
            if truth is not None and parent == tip and rng.random() < 0.7:
                place = len(tokens) + depth[parent]
                if place < len(truth) and list(truth[: len(tokens)]) == tokens:
                    token, tip = truth[place], index
            nodes.append(token)
            parents.append(parent)
            depth[index] = depth[parent] + 1
        return TokenTree(tuple(nodes), tuple(parents))

    return propose


def always_right(texts: Sequence[Sequence[int]]) -> Propose:
    """A chain of what will really come, for sessions whose whole token list begins like one of
    `texts`."""

    def propose(tokens: list[int], session: DraftSession) -> TokenTree | None:
        for text in texts:
            if len(text) > len(tokens) and list(text[: len(tokens)]) == tokens:
                chain = text[len(tokens) : len(tokens) + session.budget.max_depth]
                return TokenTree.chain(chain[: session.budget.max_nodes])
        return None

    return propose


def always_wrong(texts: Sequence[Sequence[int]], vocab_size: int) -> Propose:
    """As always_right, with every token off by one."""
    right = always_right(texts)

    def propose(tokens: list[int], session: DraftSession) -> TokenTree | None:
        tree = right(tokens, session)
        return (
            None
            if tree is None
            else TokenTree(tuple((t + 1) % vocab_size for t in tree.tokens), tree.parents)
        )

    return propose


def at_rates(
    texts: Sequence[Sequence[int]], rates: Sequence[float], vocab_size: int, seed: int = 0
) -> Propose:
    """A chain whose token at each depth is the true one with that depth's rate, else another; past
    the last rate it holds. Sessions that begin like none of `texts` get nothing."""
    rng, right = random.Random(seed), always_right(texts)

    def propose(tokens: list[int], session: DraftSession) -> TokenTree | None:
        tree = right(tokens, session)
        if tree is None or not len(tree):
            return None
        chain = [
            token if rng.random() < rates[min(depth, len(rates) - 1)] else (token + 1) % vocab_size
            for depth, token in enumerate(tree.tokens)
        ]
        return TokenTree.chain(chain)

    return propose


class _DrafterShell:
    """The runtime's Service around a ScriptedDrafter."""

    service_names = ("draftwire.v1.Drafter",)

    def __init__(self, drafter: ScriptedDrafter) -> None:
        self._drafter = drafter

    def register(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServicer_to_server(self._drafter, server)

    async def start(self) -> None: ...

    def progress(self) -> bool:
        return True

    async def drain(self) -> None: ...

    async def close(self) -> None: ...


@contextlib.asynccontextmanager
async def running(service: Any, config: WireConfig) -> AsyncIterator[str]:
    """Serve on a free port of loopback until the block ends; yields the address."""
    stop = asyncio.Event()
    address: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(service, config, ready=address.set_result, stop=stop))
    try:
        await asyncio.wait({task, address}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield address.result()
    finally:
        stop.set()
        await task


@contextlib.asynccontextmanager
async def scripted(drafter: ScriptedDrafter, listen: str = "127.0.0.1:0") -> AsyncIterator[str]:
    """A ScriptedDrafter, on a free port of loopback unless told otherwise."""
    config = WireConfig(listen=listen, drain_grace_s=0.2, log_level="error")
    async with running(_DrafterShell(drafter), config) as address:
        yield address


@contextlib.asynccontextmanager
async def verifier(
    model: Path | str, drafters: Sequence[str] = (), **settings: Any
) -> AsyncIterator[tuple[VerifierService, Any]]:
    """The shipped verifier in this process; yields it and a stub."""
    defaults = VerifierConfig(
        listen="127.0.0.1:0",
        model=str(model),
        dtype="float32",
        drafters=tuple(drafters),
        kv_tokens=4096,
        drain_grace_s=0.5,
        log_level="error",
        # Every proposal is asked for, waited for and verified unless a test says otherwise.
        speculation="fixed",
        profile_s=0,
    )
    config = replace(defaults, **settings)
    service = VerifierService(config)
    async with (
        running(service, config) as address,
        open_channel(address, ChannelConfig()) as channel,
    ):
        stub = verifier_pb2_grpc.VerifierStub(channel)
        stub.channel = channel
        yield service, stub


@dataclass
class Answer:
    """What a client got."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    chunks: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    started: Any = None
    finished: Any = None
    trailers: Any = None


async def generate(stub: Any, prompt: Sequence[int] | str, **fields: Any) -> Answer:
    """One request to its end. `fields`: sampling, stop, speculation, output as dicts; timeout."""
    timeout = fields.pop("timeout", 120)
    request = verifier_pb2.GenerateRequest(
        sampling=types_pb2.SamplingParams(**fields.pop("sampling", {"temperature": 0})),
        stop=types_pb2.StopConditions(**fields.pop("stop", {})),
        speculation=types_pb2.SpeculationOptions(**fields.pop("speculation", {})),
        output=verifier_pb2.OutputOptions(**fields.pop("output", {})),
        **fields,
    )
    if isinstance(prompt, str):
        request.text = prompt
    else:
        request.token_ids.ids.extend(prompt)
    answer = Answer()
    call = stub.Generate(request, timeout=timeout)
    async for message in call:
        kind = message.WhichOneof("event")
        if kind == "started":
            answer.started = message.started
        elif kind == "delta":
            answer.tokens.extend(message.delta.token_ids)
            answer.text += message.delta.text
            answer.chunks.append(len(message.delta.token_ids))
            answer.logprobs.extend(message.delta.logprobs)
        else:
            answer.finished = message.finished
    answer.trailers = dict(await call.trailing_metadata())
    return answer


async def eventually(check: Callable[[], Any]) -> None:
    """Return when `check` (a function, or a coroutine function) says yes: for states of other
    processes and threads, which can only be polled. The test's time limit ends it otherwise."""
    while True:
        found = check()
        if await found if asyncio.iscoroutine(found) else found:
            return
        await asyncio.sleep(0.02)


OFF = {"mode": types_pb2.SPECULATION_MODE_OFF}


def prompts(
    count: int, vocab_size: int, seed: int = 0, low: int = 1, high: int = 90
) -> Iterator[list[int]]:
    """Random prompts."""
    rng = random.Random(seed)
    for _ in range(count):
        yield [rng.randrange(vocab_size) for _ in range(rng.randint(low, high))]
