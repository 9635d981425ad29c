"""The site of docs/: the generated pages of its reference, its pictures, and the hooks that mkdocs calls.

``make docs`` builds it. ``python -m deploy.site`` draws the pictures, which are kept; a test compares them.
"""
