"""Which files run here: the interpreted ones where TRITON_INTERPRET=1, else the compiled ones."""

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = ["test_sm90*.py"] if INTERPRETED else ["test_interpreted_*.py"]


@pytest.fixture(scope="session", autouse=INTERPRETED)
def _language_patched_once() -> Iterator[None]:
    """Spares a third of the interpreter's time.

    It patches triton.language for every call of a @jit function from another one, though the outer
    call has done so already. Where Triton has no such function, nothing is spared.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    original: Callable[[Any], Any] | None = getattr(interpreter, "_patch_lang", None)
    if original is None:
        yield
        return
    active: set[int] = set()

    class Scope:
        """Undoes the patches of one call; of a nested one there are none."""

        def __init__(self, inner: Any, mine: set[int]) -> None:
            self.inner, self.mine = inner, mine

        def restore(self) -> None:
            active.difference_update(self.mine)
            if self.inner is not None:
                self.inner.restore()

    def patch(function: Any) -> Scope:
        known = {id(v) for v in function.__globals__.values() if v is tl or v is tl.core} - active
        if not known:
            return Scope(None, set())
        active.update(known)
        return Scope(original(function), known)

    interpreter._patch_lang = patch
    yield
    interpreter._patch_lang = original
