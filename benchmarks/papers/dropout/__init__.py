"""Tables of The Implicit and Explicit Regularization Effects of Dropout (Wei, Kakade and Ma 2020)."""
