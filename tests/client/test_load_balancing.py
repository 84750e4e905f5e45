"""Several servers behind one target: calls are spread, and one that fails is passed over."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable

import pytest

from draftwire_client import (
    AsyncClient,
    Client,
    HealthStatus,
    InvalidArgument,
    LoadBalancingConfig,
    RetryConfig,
)
from draftwire_client.testing import Reply, ScriptedVerifier

Serve = Callable[..., ScriptedVerifier]
QUICK = RetryConfig(max_attempts=10, initial_backoff_s=0.01, max_backoff_s=0.05)


def three(serve: Serve) -> tuple[list[ScriptedVerifier], str]:
    servers = [serve(Reply.of(name)) for name in "abc"]
    return servers, ",".join(server.target for server in servers)


def until_all_answer(client: Client, names: str) -> None:
    """Calls until each of `names` has answered: connections come up one by one."""
    seen: set[str] = set()
    while not set(names) <= seen:
        seen.add(client.generate("hi").text)


def test_calls_are_spread_evenly_over_a_list(serve: Serve) -> None:
    _, target = three(serve)
    with Client.connect(target, retry=QUICK) as client:
        until_all_answer(client, "abc")
        assert Counter(client.generate("hi").text for _ in range(30)) == dict.fromkeys("abc", 10)


def test_calls_of_the_async_client_are_spread_too(serve: Serve) -> None:
    _, target = three(serve)

    async def main() -> None:
        async with AsyncClient.connect(target, retry=QUICK) as client:
            seen: set[str] = set()
            while seen != set("abc"):
                seen.add((await client.generate("hi")).text)
            items = await client.batch(["hi"] * 30, concurrency=1)
            assert Counter(item.unwrap().text for item in items) == dict.fromkeys("abc", 10)

    asyncio.run(main())


def test_a_server_that_is_lost_fails_no_call_and_one_that_comes_back_is_used_again(
    serve: Serve,
) -> None:
    servers, target = three(serve)
    with Client.connect(target, retry=QUICK) as client:
        until_all_answer(client, "abc")
        servers[1].close()
        assert {client.generate("hi").text for _ in range(20)} == {"a", "c"}
        serve(Reply.of("b"), listen=servers[1].target)
        until_all_answer(client, "b")


def test_a_server_that_is_not_serving_is_passed_over(serve: Serve) -> None:
    servers, target = three(serve)
    servers[0].set_health(HealthStatus.NOT_SERVING)
    with Client.connect(target, retry=QUICK) as client:
        until_all_answer(client, "bc")
        assert {client.generate("hi").text for _ in range(20)} == {"b", "c"}
        servers[0].set_health(HealthStatus.SERVING)
        until_all_answer(client, "a")
        servers[2].set_health(HealthStatus.NOT_SERVING)
        while client.generate("hi").text == "c":  # the news travels on a stream of its own
            pass
        assert {client.generate("hi").text for _ in range(20)} == {"a", "b"}


def test_without_health_checks_a_server_is_used_whatever_it_says(serve: Serve) -> None:
    servers, target = three(serve)
    servers[0].set_health(HealthStatus.NOT_SERVING)
    unchecked = LoadBalancingConfig(health_checked=False)
    with Client.connect(target, retry=QUICK, load_balancing=unchecked) as client:
        until_all_answer(client, "abc")


def test_pick_first_stays_with_a_server_until_it_is_lost(serve: Serve) -> None:
    servers, target = three(serve)
    first = LoadBalancingConfig(policy="pick_first")
    with Client.connect(target, retry=QUICK, load_balancing=first) as client:
        (name,) = {client.generate("hi").text for _ in range(10)}
        servers["abc".index(name)].close()
        (other,) = {client.generate("hi").text for _ in range(10)}
        assert other != name


def test_a_policy_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"load_balancing\.policy"):
        LoadBalancingConfig(policy="random")  # type: ignore[arg-type]
