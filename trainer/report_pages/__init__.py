"""Reports as Markdown, as one HTML file and as charts: sections of tables, notes and curves."""
