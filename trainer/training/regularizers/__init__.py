"""Regularizers of training jobs. The regularizers of dropout (Wei, Kakade and Ma) also work with any torch module.

``layers``: access to hidden layers by hooks. ``draws``: sources of randomness. ``outputs``: losses and their output
Hessians. ``dropout``: equations of the paper, and the value that a step differentiates. ``objective``: the objective of
a job. ``rows``: lookups of penalties on rows. ``sam``, ``early_stopping``: changes of the training loop. This file
imports none of these modules.
"""
