"""Content of each page, gathered from database and store and put into words; templates only lay it out."""
