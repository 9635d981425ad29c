"""The protocol of a run between the process that starts it and the run: directory, events, process, failures.

Without torch: the service imports it.
"""
