"""Checks of what this version can run; each refusal names the field and the remedy. Torch-free.

The checks are called while a spec is parsed; no other caller is needed.
"""
