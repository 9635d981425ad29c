"""Tables for raw 64-bit ids unknown before training: new ids get rows, and ids that stay away lose them."""
