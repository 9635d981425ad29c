"""Tables whose ids are not known before training: rows are given to raw 64-bit ids as they come, and taken back."""
