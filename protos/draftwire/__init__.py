"""The contract of Draftwire and what both of its ends must share."""
