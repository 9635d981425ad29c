"""The protocol between a run and the process that starts it: directory, events, process, failures.

The package does not import torch, because the service imports it.
"""
