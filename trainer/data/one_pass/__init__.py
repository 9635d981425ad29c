"""Training on rows as they are read, without a preparation: ``dataset: {one_pass: true}`` of a job.

``data.OnePassData`` is the way in; docs/adr/0060-one-pass.md has the reasons.
"""
