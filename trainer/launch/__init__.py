"""The process of an attempt: it starts the ranks on this host or a Ray cluster, and records the final state.

The driver is started as ``python -m trainer.launch.entrypoint``.
"""
