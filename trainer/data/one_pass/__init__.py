"""Training on rows as they are read, without a preparation: ``dataset: {one_pass: true}`` of a job.

Start reading at ``data.OnePassData``; docs/adr/0060-one-pass.md gives the reasons.
"""
