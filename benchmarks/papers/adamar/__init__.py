"""Tables of Adaptive Regularization (Li and Lyu): AdamAR beside other optimizers, and its alpha."""
