"""What goes wrong in training for reasons a user can mend. Does not know what each is about."""

from __future__ import annotations


class TrainingError(Exception):
    """A command cannot go on; the message names the file or tensor and what is wrong with it."""
