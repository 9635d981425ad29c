"""The plots of docs/reports: each is drawn from a table of its report, so that each number is written in one place.

``tables`` reads a table, ``charts`` has the kinds of plots, ``figure`` turns a plot into SVG; the other modules have a
function for each plot. ``registry.PLOTS`` names them all.
"""
