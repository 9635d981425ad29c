"""Parts of models that depend on the job's seed: towers, dropout, batch normalisation, initial weights."""
