"""What raw columns become: ids, hashes, vocabularies, numbers, labels, lists. Without torch."""
