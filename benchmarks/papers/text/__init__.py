"""Trials on text, of the papers' language models: torch modules with the library's parts, trained without a job."""
