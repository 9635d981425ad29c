"""Single-device models, a file each; ``registry`` has them by name. Sharding is applied around them.

``size`` needs no torch. None of them knows of ranks, runs or the service.
"""
