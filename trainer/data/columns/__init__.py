"""Conversion of raw columns: ids, hashes, vocabularies, numbers, labels, lists. Without torch."""
