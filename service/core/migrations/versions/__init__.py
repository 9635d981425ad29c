"""Revisions; sorted by file name, the oldest comes first."""
