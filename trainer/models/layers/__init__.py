"""Parts of models whose values are functions of the job's seed: towers, dropout, batch normalisation, first weights."""
