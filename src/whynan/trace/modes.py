"""What the dispatch modes of replays have in common."""

from __future__ import annotations

from torch.utils._python_dispatch import TorchDispatchMode


class ReplayMode(TorchDispatchMode):
    """Sees the operations of a replay, in which nothing is compiled.

    torch wraps the handler of a mode so that the compiler stays out of it, at some microseconds for each operation; here there is no
    compiler to keep out.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False
