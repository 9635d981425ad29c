"""Item vectors as refresh and store exchange them, and rows that are computed when they are read; without torch."""
