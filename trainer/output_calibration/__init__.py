"""Maps from a model's scores to calibrated probabilities, by kind: fitted on held-out rows, kept as JSON. Torch-free.

Evaluation fits and measures them, inference applies them.
"""
