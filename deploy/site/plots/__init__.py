"""The plots of docs/reports: each is drawn from a table of its report, so that a figure stands in one place.

``tables`` reads a table, ``charts`` has the kinds of plots, ``figure`` makes an SVG of one; the other modules have a
function for each plot. ``registry.PLOTS`` names them all.
"""
