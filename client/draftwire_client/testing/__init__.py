"""For tests of code that uses the client: a verifier that answers from a script, over real gRPC.

    with ScriptedVerifier(Reply.of("Hello")) as server, Client.connect(server.target) as client:
        assert client.generate("Hi").text == "Hello"

It hosts no model and judges no request. `LocalPair` is the real drafter and verifier on a tiny
model instead, where `draftwire[serve]` is installed. Both are for tests; nothing here is meant to
serve.
"""

from draftwire_client.testing.pair import LocalPair
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
)
from draftwire_client.testing.server import ReceivedCall, ScriptedVerifier, ServerTLS

__all__ = [
    "Abort",
    "Cut",
    "Fail",
    "Finish",
    "Hold",
    "LocalPair",
    "Pause",
    "ReceivedCall",
    "Reply",
    "Say",
    "ScriptedVerifier",
    "Send",
    "ServerTLS",
    "Start",
]
