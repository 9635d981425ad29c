"""Each figure in the documents comes from one file here, side by side with a peer."""
