"""Reports of recipes: tables beside the published figures, plots, pages."""
