"""From a run's raw item rows to a published version: align, average, judge by the gate, publish.

Without torch. ``publish`` is the entry point; the trainer and the service's gate routes call it.
"""
