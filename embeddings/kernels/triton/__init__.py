"""The GPU kernel, in Triton: the reference's bits where bits are drawn, else its values up to rounding."""
