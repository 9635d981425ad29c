"""Single-device models, a file each, listed by name in ``registry``. Sharding is applied around them.

``size`` needs no torch. No model depends on ranks, runs or the service.
"""
