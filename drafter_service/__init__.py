"""The drafter: drafts blocks of tokens for verifiers; all that it holds may be lost at any time."""
