"""Item vectors, the form in which refresh and store exchange items, and rows that are computed when they are read."""
