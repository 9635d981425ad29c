"""Mądry's lecture 3 of 6.S979: the generalization report of Adam and AdamAR, and its figures on towers."""
