"""The scripted verifier: a gRPC server in this process, on threads of its own.

Knows how replies become calls, and what each call got. Judges no request, hosts no model. Threads,
because then it serves clients of the same process whether they use asyncio or not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import grpc
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from draftwire.auth import TokenCheck, server_credentials
from draftwire.channel import server_options
from draftwire.config import WireConfig
from draftwire.errors import DraftwireError, Unauthenticated, to_proto
from draftwire.v1 import verifier_pb2, verifier_pb2_grpc
from draftwire_client.enums import HealthStatus
from draftwire_client.responses import ACCEPTANCE_TRAILER, USAGE_TRAILER
from draftwire_client.testing.script import (
    Abort,
    Cut,
    Fail,
    Finish,
    Hold,
    Pause,
    Reply,
    Say,
    Send,
    Start,
    Step,
)

SERVICE = "draftwire.v1.Verifier"
Script = Reply | Callable[[verifier_pb2.GenerateRequest], Reply]
About = verifier_pb2.VerifierGetInfoResponse | DraftwireError


@dataclass(frozen=True, slots=True)
class ServerTLS:
    """PEM files of a server with TLS; with `client_ca` clients must show a certificate."""

    cert: Path
    key: Path
    client_ca: Path | None = None


@dataclass(eq=False)
class ReceivedCall:
    """One Generate call as the server saw it."""

    request: verifier_pb2.GenerateRequest
    metadata: dict[str, str | bytes]
    time_remaining_s: float | None
    """Seconds to the client's deadline when the call arrived; None: it has none."""
    sent: list[Say] = field(default_factory=list)
    cancelled: bool = False
    """After the end: the client left, or its deadline passed, before the reply was over."""
    _gone: threading.Event = field(default_factory=threading.Event)
    # What Hold waits for. One for each call: hundreds that shared one would wake one another.
    _go_on: threading.Event = field(default_factory=threading.Event)
    _over: bool = False

    @property
    def ended(self) -> bool:
        """Whether the call is over, or the client gone."""
        return self._gone.is_set()

    def wait_ended(self, timeout: float = 10.0) -> bool:
        """Whether the call ended within so many seconds."""
        return self._gone.wait(timeout)

    def _end(self) -> None:
        self.cancelled = not self._over
        self._gone.set()
        self._go_on.set()


class ScriptedVerifier:
    """A verifier that gives its replies in order, the last one again and again.

    A reply may be a function of the request. Serves Generate, GetInfo and health from construction
    on; use it in `with`, or `close` it.
    """

    def __init__(
        self,
        *replies: Script,
        listen: str = "127.0.0.1:0",
        tls: ServerTLS | None = None,
        token: str | None = None,
        info: About | Callable[[], About] | None = None,
        max_calls: int = 64,
    ) -> None:
        """`token` is asked of every call but health; `max_calls` run at a time, others wait.

        `info` is what GetInfo answers, or a function that is asked each time.
        """
        wire = WireConfig(
            listen=listen,
            tls_cert=tls.cert if tls else None,
            tls_key=tls.key if tls else None,
            tls_client_ca=tls.client_ca if tls else None,
        )
        wire.check()
        self.calls: list[ReceivedCall] = []
        """Generate calls in the order of their arrival."""
        self._replies: Sequence[Script] = replies or (Reply.of("Hello, world."),)
        self._info = verifier_pb2.VerifierGetInfoResponse() if info is None else info
        self._tokens = TokenCheck([token]) if token is not None else None
        self._changed = threading.Condition()
        self._released = False
        self._server = grpc.server(
            ThreadPoolExecutor(max_calls, thread_name_prefix="scripted-verifier"),
            options=server_options(wire),
        )
        self._health = health.HealthServicer()
        verifier_pb2_grpc.add_VerifierServicer_to_server(_Servicer(self), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self.set_health(HealthStatus.SERVING)
        self.set_health(HealthStatus.SERVING, SERVICE)
        credentials = server_credentials(wire)
        if credentials is None:
            port = self._server.add_insecure_port(listen)
        else:
            port = self._server.add_secure_port(listen, credentials)
        unix = listen.startswith("unix:")
        self.target = listen if unix else f"{listen.rpartition(':')[0]}:{port}"
        """The address for `connect`."""
        self._server.start()

    def set_health(self, status: HealthStatus, service: str = "") -> None:
        """What health answers for a service from now on."""
        number = health_pb2.HealthCheckResponse.ServingStatus.Value(status.name)
        self._health.set(service, number)

    def release(self) -> None:
        """Let every Hold step, now and later, go on."""
        with self._changed:
            self._released = True
            for call in self.calls:
                call._go_on.set()

    def wait_for_calls(self, count: int, timeout: float = 10.0) -> list[ReceivedCall]:
        """The first `count` calls, once they have arrived. Raises TimeoutError."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.calls) >= count, timeout):
                raise TimeoutError(f"{len(self.calls)} of {count} calls arrived in {timeout} s")
            return self.calls[:count]

    def close(self) -> None:
        """Stop at once; calls that are running are cut off."""
        self._server.stop(0).wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _arrive(self, request: verifier_pb2.GenerateRequest, context: Any) -> ReceivedCall:
        """Enter a call in the record and have its end noted, however it comes."""
        remaining = context.time_remaining()
        call = ReceivedCall(request, dict(context.invocation_metadata()), remaining)

        def ended() -> None:
            with self._changed:
                call._end()
                self._changed.notify_all()

        with self._changed:
            self.calls.append(call)
            if self._released:
                call._go_on.set()
            self._changed.notify_all()
        if not context.add_callback(ended):
            ended()
        return call

    def _reply(self, request: verifier_pb2.GenerateRequest, call: ReceivedCall) -> Reply:
        script = self._replies[min(self.calls.index(call), len(self._replies) - 1)]
        return script if isinstance(script, Reply) else script(request)

    def _check_token(self, context: Any) -> None:
        if self._tokens is not None and not self._tokens.allows(context.invocation_metadata()):
            _abort(context, Unauthenticated("TOKEN_REFUSED", "a valid bearer token is needed"))


class _Servicer(verifier_pb2_grpc.VerifierServicer):
    """Plays replies on gRPC's threads."""

    def __init__(self, owner: ScriptedVerifier) -> None:
        self._owner = owner

    def GetInfo(self, request: Any, context: Any) -> verifier_pb2.VerifierGetInfoResponse:
        self._owner._check_token(context)
        info = self._owner._info
        about = info() if callable(info) else info
        if isinstance(about, DraftwireError):
            _abort(context, about)
        return about

    def Generate(
        self, request: verifier_pb2.GenerateRequest, context: Any
    ) -> Iterator[verifier_pb2.GenerateResponse]:
        self._owner._check_token(context)
        call = self._owner._arrive(request, context)
        reply = self._owner._reply(request, call)
        started = False
        for step in (*reply.steps, Finish()):
            if not started and isinstance(step, Start | Say | Send | Finish):
                started = True
                if not isinstance(step, Send):
                    yield _started(request, reply)
            match step:
                case Say():
                    call.sent.append(step)
                    yield verifier_pb2.GenerateResponse(delta=_delta(step))
                case Send():
                    yield step.message
                case Pause():
                    call.wait_ended(step.seconds)
                case Hold():
                    call._go_on.wait()
                case Fail() | Abort() | Finish() | Cut():
                    yield from _end(step, call, reply, context)
                    return
            if call.ended:
                return


def _end(
    step: Step, call: ReceivedCall, reply: Reply, context: Any
) -> Iterator[verifier_pb2.GenerateResponse]:
    """The last message, if there is one, and the status."""
    usage, stats = reply.usage(call.sent), reply.statistics(call.sent)
    trailers: tuple[tuple[str, bytes], ...] = ()
    if reply.trailers and call.sent:
        trailers = (
            (USAGE_TRAILER, usage.SerializeToString()),
            (ACCEPTANCE_TRAILER, stats.SerializeToString()),
        )
    if isinstance(step, Finish):
        number: Any = verifier_pb2.FinishReason.Value(f"FINISH_REASON_{step.reason.name}")
        yield verifier_pb2.GenerateResponse(
            finished=verifier_pb2.Finished(
                reason=number,
                matched_stop=step.matched_stop,
                usage=usage,
                acceptance=stats,
                timing=reply.timing,
            )
        )
    call._over = True
    if isinstance(step, Abort):
        context.set_trailing_metadata(trailers)
        context.abort(step.code, step.message)
    if isinstance(step, Fail):
        _abort(context, step.error, trailers, step.retry_after_s)
    context.set_trailing_metadata(trailers)


def _started(request: verifier_pb2.GenerateRequest, reply: Reply) -> verifier_pb2.GenerateResponse:
    started = verifier_pb2.Started(
        request_id=request.request_id or "scripted",
        sampling=request.sampling,
        stop=request.stop,
        speculation=request.speculation,
        prompt_tokens=reply.prompt_tokens,
    )
    if not started.sampling.HasField("seed"):
        started.sampling.seed = reply.seed
    return verifier_pb2.GenerateResponse(started=started)


def _delta(step: Say) -> verifier_pb2.Delta:
    logprobs = [
        verifier_pb2.TokenLogprob(token_id=token_id, logprob=logprob)
        for token_id, logprob in zip(step.token_ids, step.logprobs, strict=False)
    ]
    return verifier_pb2.Delta(text=step.text, token_ids=step.token_ids, logprobs=logprobs)


def _abort(
    context: Any,
    error: DraftwireError,
    trailers: tuple[tuple[str, bytes], ...] = (),
    retry_after_s: float | None = None,
) -> NoReturn:
    """End the call with google.rpc.Status, keeping `trailers`, which a plain abort would drop."""
    proto = to_proto(error)
    if retry_after_s is not None:
        delay = Duration()
        delay.FromNanoseconds(round(retry_after_s * 1e9))
        proto.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    status: Any = rpc_status.to_status(proto)
    context.set_trailing_metadata((*trailers, *status.trailing_metadata))
    context.abort(status.code, status.details)
    raise AssertionError("abort returned")
