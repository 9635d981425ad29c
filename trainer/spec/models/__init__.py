"""Kinds of models as a job asks for them: a file for each family, ``registry`` has them by name. Without torch."""
