"""Reports of recipes: tables with the published figures next to ours, plots, pages."""
