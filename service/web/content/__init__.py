"""What each page shows, gathered from database and store and put into words; the templates only lay it out."""
