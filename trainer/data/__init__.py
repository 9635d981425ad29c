"""From rows to typed batches: sources are prepared into columns once per run, which every rank reads as batches."""
