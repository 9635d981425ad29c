"""Topics of messages as sources of rows: which messages come next, what is in them. Torch-free.

``followed_topic`` decides what is read, ``kafka`` speaks to the brokers, ``formats`` turns messages into rows.
"""
