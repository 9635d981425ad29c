"""Table formats: folders in which a log, not the content, determines the files with rows.

Each format is a module; ``registry`` lists them. Without torch; the formats' own libraries are optional extras, only
imported to read such a folder.
"""
