"""For tests of code that uses the client: a verifier that answers from a script, over real gRPC.

    with ScriptedVerifier(Reply.of("Hello")) as server, Client.connect(server.target) as client:
        assert client.generate("Hi").text == "Hello"

It hosts no model and judges no request. It is for tests; nothing in it is meant to serve.
"""

from draftwire_client.testing.script import Cut, Fail, Finish, Hold, Pause, Reply, Say, Send, Start
from draftwire_client.testing.server import ReceivedCall, ScriptedVerifier, ServerTLS

__all__ = [
    "Cut",
    "Fail",
    "Finish",
    "Hold",
    "Pause",
    "ReceivedCall",
    "Reply",
    "Say",
    "ScriptedVerifier",
    "Send",
    "ServerTLS",
    "Start",
]
