"""The life of an attempt: its process, its ranks on this host or a Ray cluster, its final state.

Started as ``python -m trainer.launch.entrypoint``; nothing else in trainer imports it.
"""
