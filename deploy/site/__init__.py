"""The site of docs/: the pages of its reference, its pictures, and what mkdocs calls while it builds.

``python -m deploy.site`` writes what is generated; a test holds that the committed files are what it writes.
"""
