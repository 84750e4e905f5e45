"""The error of a checkpoint that cannot be used. Knows nothing else."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint that cannot be used. `field` is the config field, tensor or file; `value` what
    it holds; `limit` what would be allowed.
    """

    def __init__(self, field: str, value: object, limit: str) -> None:
        super().__init__(f"{field} is {str(value)[:200]}; it must be {limit}")
        self.field = field
        self.value = value
        self.limit = limit
