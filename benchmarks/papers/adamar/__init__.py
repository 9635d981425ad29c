"""Tables of Adaptive Regularization (Li and Lyu): AdamAR compared with other optimizers, and its alpha."""
