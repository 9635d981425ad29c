"""Kinds of models as a job names them: a file for each family, listed by name in ``registry``. Torch-free."""
