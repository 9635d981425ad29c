"""Table formats: folders whose log, not their content, says which files hold rows. A module for each, and the registry.

Without torch; the formats' own libraries are optional extras, imported for such a folder alone.
"""
