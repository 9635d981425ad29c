"""Data sets of the papers' tables as users' documents, texts as rows of word ids, and generated rows."""
