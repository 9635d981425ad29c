"""The protocol of a run between who starts it and what it does: directory, events, process, failures.

Without torch: the service imports it.
"""
