"""Charts as inline SVG: no script, no library, colours from the page's own style sheet."""
