"""The GPU kernel, in Triton: random draws equal the reference kernel's bit for bit, other values up to rounding.

The arguments of its programs are flat because Triton passes no structs.
"""
